"""What a command is, and what it returns."""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from tokendrop.output import log


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command returns; `main` prints it and ends the process."""

    result: Mapping[str, Any]
    """What --json prints."""
    text: str = ""
    """What is printed without --json; nothing where it is empty."""
    exit_code: int | None = 0
    is_corpus: bool = False
    """Whether it holds text of a corpus, which is printed as it is."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command, as `--help` describes it."""

    name: str
    """As it is typed: `plan`, or `data stats` for one of a group."""
    run: Callable[[argparse.Namespace], Outcome]
    arguments: Callable[[argparse.ArgumentParser], None]
    about: str
    example: str
    more: str = ""
    """What its own page says beside `about`."""
    extra: str = "platform"
    """The extra of our package that installs what it needs; for the commands of the core, what it needs beyond."""


@dataclass(frozen=True, slots=True)
class Group:
    """Commands that share their first word."""

    name: str
    about: str
    commands: tuple[Command, ...]
    default: str = ""
    """The second word of the command that is meant where none of them is named."""


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """For commands that take none."""


def fail(reason: str) -> NoReturn:
    """End the process with exit code 1 and the reason on standard error."""
    log(f"tokendrop: {reason}")
    sys.exit(1)
