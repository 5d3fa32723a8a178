"""The command `tokendrop`: reads what the user typed, runs one command, prints what it returns.

A command is a file of this folder and an entry of `COMMANDS`. Heavy libraries are imported where they are used, so that
`plan` and `--help` answer at once, without torch or Ray.
"""

import argparse
import atexit
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import TracebackType

from tokendrop.cli import (
    bench,
    cluster,
    compare,
    completion,
    data,
    evaluate,
    export,
    fork,
    generate,
    imports,
    plan,
    prepare,
    profile,
    report,
    reproduce,
    runs,
    submit,
    sweep,
    sync,
    train,
    watch,
)
from tokendrop.cli.arguments import Parser, wrong_usage
from tokendrop.cli.command import Command, Group, Outcome
from tokendrop.errors import UserError, first_line
from tokendrop.output import print_json, print_text, results_alone
from tokendrop.secrets import redact

_OF_IMAGES = {"PIL", "timm", "torchvision"}  # packages that commands for all tasks need for images alone

COMMANDS: tuple[Command | Group, ...] = (
    plan.COMMAND,
    imports.GROUP,
    profile.COMMAND,
    prepare.COMMAND,
    train.COMMAND,
    fork.COMMAND,
    watch.COMMAND,
    compare.COMMAND,
    sweep.COMMAND,
    reproduce.GROUP,
    evaluate.COMMAND,
    export.COMMAND,
    generate.COMMAND,
    report.COMMAND,
    runs.GROUP,
    submit.COMMAND,
    cluster.GROUP,
    sync.COMMAND,
    bench.GROUP,
    data.GROUP,
    completion.COMMAND,
)


def all_commands() -> Iterator[Command]:
    """Those of all groups, and those of none."""
    for entry in COMMANDS:
        yield from entry.commands if isinstance(entry, Group) else [entry]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exit code 0 (done), 1 (run failed, data damaged), 2 (user's mistake), 130 (interrupted).

    Args:
        arguments: what follows `tokendrop`; by default those of this process.
    """
    hide_secrets_in_tracebacks()
    try:
        outcome = run(parse(arguments))
        sys.stdout.flush()
        if outcome.exit_code:
            sys.exit(outcome.exit_code)
    except UserError as error:
        print(f"tokendrop: {' '.join(str(error).splitlines())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever read the output, `| head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # of storage or a network that is away
        print(f"tokendrop: {first_line(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("tokendrop: stopped", file=sys.stderr)
        # what ends at the exit, a Ray that was started here above all, but no destructors: those of a Ray that had
        # just begun to start crash
        atexit._run_exitfuncs()
        os._exit(130)


def run(options: argparse.Namespace) -> Outcome:
    """Run the command that was typed, and print what it returns.

    Raises:
        UserError: of the command; or a package that it needs is not installed.
    """
    from tokendrop.launch.loopback import close_to_others

    command: Command = options.command
    if command is not submit.COMMAND:  # which shows another Ray the token of that
        close_to_others()
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # for the bars of libraries; read when tqdm is imported
    try:
        with results_alone():
            outcome = command.run(options)
    except ModuleNotFoundError as error:
        missing = (error.name or "tokendrop").partition(".")[0]
        if find_spec(missing) is not None:  # a mistake in our code, or in that of a library
            raise
        extra = "vision" if missing in _OF_IMAGES else command.extra
        raise UserError(f"{command.name}: {missing} is not installed; pip install 'tokendrop[{extra}]'") from None
    if options.json:
        print_json(outcome.result, is_corpus=outcome.is_corpus)
    elif outcome.text:
        print_text(outcome.text, is_corpus=outcome.is_corpus)
    return outcome


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the user typed: the arguments of a command, `command` and `json`; `root`, the whole parser.

    argparse alone takes no override after an option: `JOB --resume RUN key=value`.

    Raises:
        UserError: it can't be understood.
    """
    root = parser()
    options, left = root.parse_known_args(_with_default(sys.argv[1:] if arguments is None else arguments))
    if any(text.startswith("-") for text in left) or (left and not hasattr(options, "overrides")):
        raise wrong_usage(f"unrecognized arguments: {' '.join(left)}", f"tokendrop {options.command.name}")
    if left:
        options.overrides = [*options.overrides, *left]
    return options


def _with_default(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the command of a group that has a default and is given without one."""
    first, second = (*arguments, "", "")[:2]
    for entry in COMMANDS:
        if isinstance(entry, Group) and entry.default and entry.name == first:
            words = {"-h", "--help", *(command.name.split()[1] for command in entry.commands)}
            return [*arguments] if second in words else [first, entry.default, *arguments[1:]]
    return [*arguments]


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    root = Parser(
        prog="tokendrop", description="Pretrain transformers with random-LTD on Ray, and measure what it saves."
    )
    root.set_defaults(root=root)
    root.add_argument("--version", action="version", version=f"tokendrop {_version()}")
    top = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for entry in COMMANDS:
        if isinstance(entry, Command):
            _add(entry, top)
            continue
        group = top.add_parser(entry.name, help=entry.about, description=entry.about)
        below = group.add_subparsers(title="commands", required=True, metavar="COMMAND")
        for command in entry.commands:
            _add(command, below)
    return root


def _version() -> str:
    """That of the installed package; a checkout that runs by its sources alone has none."""
    try:
        return version("tokendrop")
    except PackageNotFoundError:
        return "of a checkout"


def _add(command: Command, parsers: "argparse._SubParsersAction[Parser]") -> None:
    description, example = f"{command.about} {command.more}".rstrip(), f"example: {command.example}"
    name = command.name.rpartition(" ")[2]
    added = parsers.add_parser(name, help=command.about, description=description, epilog=example)
    command.arguments(added)
    added.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    added.set_defaults(command=command)


def hide_secrets_in_tracebacks() -> None:
    """From here on, an error that nobody expected is shown without the secrets that it may quote."""

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        sys.stderr.write(redact("".join(traceback.format_exception(kind, error, where))))

    sys.excepthook = show
    threading.excepthook = lambda told: show(told.exc_type, told.exc_value or told.exc_type(), told.exc_traceback)
