"""`python jobs/run.py COMMAND ...` is `tokendrop COMMAND ...`, where only the dependencies are installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "platform"))

if __name__ == "__main__":
    try:
        from tokendrop.cli import main

        main()
    except ModuleNotFoundError as error:
        # a job's `python` is the first on the PATH that `ray start` had on its node
        print(
            f"tokendrop: {sys.executable} has no package {error.name}: run `ray start`, on each node, with the"
            " environment active that `make install` makes; jobs take their `python` from it",
            file=sys.stderr,
        )
        sys.exit(2)
