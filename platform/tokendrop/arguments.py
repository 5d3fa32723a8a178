"""What a command is and what its arguments may be; whatever else is typed is told in one sentence."""

import argparse
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from tokendrop.config.files import unusable_path
from tokendrop.errors import UserError
from tokendrop.secrets import redact

_LONGEST, _LONGEST_MESSAGE = 80, 400  # letters of an argument in a message, and of that
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Command:
    """One command, as `--help` tells of it."""

    name: str
    run: Callable[[argparse.Namespace], None]
    arguments: Callable[[argparse.ArgumentParser], None]
    about: str
    example: str
    more: str = ""
    """What its own page says beside `about`."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong without the usage, which `--help` prints."""

    def error(self, message: str) -> NoReturn:
        """
        Raises:
            UserError: always.
        """
        message = " ".join(message.split()).removeprefix("argument ")
        raise UserError(f"{redact(message)[:_LONGEST_MESSAGE]}; see {self.prog} --help")


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """The type of a whole number within bounds."""

    def read(text: str) -> int:
        try:
            number = int(text) if len(text) <= _LONGEST else None
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            bounds = f"of at least {least}" if most == _MOST else f"from {least} to {most:,}"
            raise argparse.ArgumentTypeError(f"want a whole number {bounds}, got {shortened(text)}")
        return number

    return read


def path(text: str) -> Path:
    """The type of a path that a file system could have."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"want a path on this machine, got {shortened(redact(text))}")
    if reason := unusable_path(text):
        raise argparse.ArgumentTypeError(reason)
    return Path(text)


def shortened(text: str) -> str:
    """An argument as messages quote it."""
    return repr(text if len(text) <= _LONGEST else f"{redact(text)[:_LONGEST]}...")


def tell_no_secrets() -> None:
    """From here on an error that nobody expected is shown without the secrets that it may quote."""

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        sys.stderr.write(redact("".join(traceback.format_exception(kind, error, where))))

    sys.excepthook = show
    threading.excepthook = lambda told: show(told.exc_type, told.exc_value or told.exc_type(), told.exc_traceback)


def end_quietly() -> None:
    """For when whoever read the output, `| head` say, has had enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
