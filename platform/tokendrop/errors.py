"""The exceptions that are told in one sentence: what the user wrote is wrong, or what was written before is damaged."""

import errno
import os
import traceback
from pathlib import Path

from tokendrop.secrets import redact

_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_TRIED_BYTES = 2**20


class UserError(ValueError):
    """A mistake in a job, a file or a command: one sentence that says what, where and what would be right.

    Commands print it alone and exit with `exit_code`. Every other exception is a failure of the run (exit 1).
    """

    exit_code = 2

    def __init__(self, sentence: str = "") -> None:
        super().__init__(redact(sentence))


class DamagedDataError(UserError):
    """A file that was right once and is not any more: cut, changed or gone. One sentence names it."""

    exit_code = 1


class StorageError(UserError):
    """Storage that takes nothing more: it is full, over its quota or read-only. To try again would not help."""

    exit_code = 1


def storage_failure(error: BaseException, folder: Path) -> str | None:
    """What the storage of a folder says, where it takes nothing more and that may have made `error`.

    Libraries wrap such errors in their own, and other storage may be full too: so a file is tried.
    """
    text = "".join(traceback.format_exception(error))
    if not any(os.strerror(code) in text for code in _NO_MORE):
        return None
    tried = folder / f".tried-{os.getpid()}"
    try:
        tried.write_bytes(bytes(_TRIED_BYTES))
    except OSError as refused:
        return refused.strerror if refused.errno in _NO_MORE else None
    finally:
        tried.unlink(missing_ok=True)
    return None


def first_line(error: BaseException) -> str:
    """The first line of what an exception of a library says, short enough to stand within a sentence."""
    text = redact(str(error))  # before it is cut, where a secret would not be known as one any more
    return (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:120]


def cause_of(error: Exception) -> str:
    """Why work on other machines failed, within a sentence, without Ray's traceback."""
    cause = getattr(error, "cause", None)  # of a RayTaskError
    error = cause if isinstance(cause, Exception) else error
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(filter(None, [error.filename and str(error.filename), error.strerror]))
    return first_line(error)
