"""The exceptions that are told in one sentence: what the user wrote is wrong, or what was written before is damaged."""


class UserError(ValueError):
    """A mistake in a job, a file or a command: one sentence that says what, where and what would be right.

    Commands print it alone and exit with `exit_code`. Every other exception is a failure of the run (exit 1).
    """

    exit_code = 2


class DamagedDataError(UserError):
    """A file that was right once and is not any more: cut, changed or gone. One sentence names it."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """The first line of what an exception of a library says, short enough to stand within a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:120]
