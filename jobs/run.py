"""`python jobs/run.py COMMAND ...` is `tokendrop COMMAND ...`, where only the dependencies are installed."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "platform"))

if __name__ == "__main__":
    if missing := next((name for name in ("yaml", "torch", "ray", "pyarrow") if find_spec(name) is None), None):
        # a job's `python` is the first on the PATH that `ray start` had on its node
        print(
            f"tokendrop: {sys.executable} has no package {missing}: run `ray start`, on each node, with the"
            " environment active that `make install` makes; jobs take their `python` from it",
            file=sys.stderr,
        )
        sys.exit(2)
    from tokendrop.cli.main import main

    main()
