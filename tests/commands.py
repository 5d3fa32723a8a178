"""Commands in processes of their own, forked from one that has imported what takes long."""

import contextlib
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

_FORKSERVER = mp.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["tokendrop.cli.main", "tokendrop.evaluate.evaluation", "tokendrop.track.audit"])


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int | None
    """Its exit code; negative for the signal that killed it, None where it had to be stopped."""
    out: str
    err: str


def outcome_of(*arguments: object, timeout_s: float) -> Outcome:
    """Run `tokendrop` with these arguments."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = _FORKSERVER.Process(target=_run, args=([*map(str, arguments)], out, err))
        process.start()
        process.join(timeout_s)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        return Outcome(code, out.read_text(), err.read_text())


def _run(arguments: list[str], out: Path, err: Path) -> None:
    from tokendrop.cli.main import main

    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    code: object = 0
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)
