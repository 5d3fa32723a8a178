"""`python jobs/run.py COMMAND ...` is `tokendrop COMMAND ...`, where only the dependencies are installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "platform"))

from tokendrop.cli import main

if __name__ == "__main__":
    main()
