"""The exceptions that are told in one sentence: what the user wrote is wrong, or what was written before is damaged."""

import errno
import os
import traceback

from tokendrop.secrets import redact

_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


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


def storage_failure(error: BaseException) -> str | None:
    """What storage said that takes nothing more, where that is what made `error`, however libraries have wrapped it."""
    text = "".join(traceback.format_exception(error))
    return next((said for code in _NO_MORE if (said := os.strerror(code)) in text), None)


def first_line(error: BaseException) -> str:
    """The first line of what an exception of a library says, short enough to stand within a sentence."""
    text = redact(str(error))  # before it is cut, where a secret would not be known as one any more
    return (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:120]
