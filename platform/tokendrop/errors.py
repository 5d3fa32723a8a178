"""The one exception that means: what the user wrote is wrong."""


class UserError(ValueError):
    """A mistake in a job, a file or a command: one sentence that says what, where and what would be right.

    Commands print it alone and exit with 2. Every other exception is a failure of the run (exit 1).
    """
