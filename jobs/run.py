"""`python jobs/run.py COMMAND ...` is `tokendrop COMMAND ...` from this tree, on a machine that has only the dependencies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "platform"))

from tokendrop.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
