"""The parser of the command line, the types of arguments, and arguments that several commands take."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tokendrop.config.files import not_a_runs_folder, unusable_path
from tokendrop.errors import UserError
from tokendrop.secrets import redact

_LONGEST, _LONGEST_MESSAGE = 80, 400  # characters of an argument in a message, and of the message
_MOST = 2**31 - 1


class Parser(argparse.ArgumentParser):
    """Raises what is wrong without the usage, which `--help` prints."""

    def error(self, message: str) -> NoReturn:
        """
        Raises:
            UserError: always.
        """
        raise wrong_usage(message, self.prog)


def wrong_usage(message: str, program: str) -> UserError:
    """What is wrong with what was typed behind `program`, in one sentence that ends with where to look."""
    message = " ".join(message.split()).removeprefix("argument ")
    return UserError(f"{redact(message)[:_LONGEST_MESSAGE]}; see {program} --help")


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """The type of a whole number from `least` to `most`.

    Raises:
        ArgumentTypeError: by the function that this returns, of any other text.
    """

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


def number(least: float, most: float) -> Callable[[str], float]:
    """The type of a number from `least` to `most`.

    Raises:
        ArgumentTypeError: by the function that this returns, of any other text.
    """

    def read(text: str) -> float:
        try:
            value = float(text) if len(text) <= _LONGEST else math.nan
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"want a number from {least:g} to {most:g}, got {shortened(text)}")
        return value

    return read


def path(text: str) -> Path:
    """The type of a path that a file system could have.

    Raises:
        ArgumentTypeError: it is a URI, too long, or has characters that no path has.
    """
    if "://" in text:
        raise argparse.ArgumentTypeError(f"want a path on this machine, got {shortened(redact(text))}")
    if reason := unusable_path(text):
        raise argparse.ArgumentTypeError(reason)
    return Path(text)


def run_place(text: str) -> Path | str:
    """The type of a run: its folder, or its address in a store, which `run_here` makes a folder of this machine.

    Raises:
        ArgumentTypeError: no run can be there.
    """
    if "://" not in text:
        return path(text)
    if reason := not_a_runs_folder(text):
        raise argparse.ArgumentTypeError(reason)
    return text


def job_file(text: str) -> str:
    """The type of a job file, which `load_job` checks; shells complete its name."""
    return text


def shortened(text: str) -> str:
    """An argument as messages quote it."""
    return repr(text if len(text) <= _LONGEST else f"{redact(text)[:_LONGEST]}...")


def add_job(parser: argparse.ArgumentParser) -> None:
    """JOB and its overrides."""
    parser.add_argument("job", type=job_file, help="job file (YAML)")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Overrides of a job: any number, before or after options."""
    help = "key=value overrides, such as train.length='500 steps' or data.sources[0].weight=2"
    parser.add_argument("overrides", nargs="*", default=[], help=help)  # by the default it is not required


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN, a run in its folder or in a store."""
    parser.add_argument("run_folder", type=run_place, metavar="RUN", help="run folder, or the address of a run")


def run_here(place: Path | str, *, checkpoint: bool = True) -> Path:
    """The folder on this machine of what `run_place` was given; a run in a store is copied.

    Args:
        checkpoint: whether its newest checkpoint is needed.
    Raises:
        UserError: there is no such run, or the store does not give it.
    """
    if isinstance(place, Path):
        return place
    from tokendrop.track.run_copy import copied_run

    return copied_run(place, checkpoint=checkpoint)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    """RUN, a run folder."""
    parser.add_argument("run_folder", type=path, metavar="RUN", help="run folder")
