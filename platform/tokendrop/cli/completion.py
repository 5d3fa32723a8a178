"""`tokendrop completion`: the script by which a shell completes commands, options and names of files."""

import argparse
from collections.abc import Iterator

from tokendrop.cli.arguments import job_file, path, run_place
from tokendrop.cli.command import Command, Outcome

_FILE_TYPES = (job_file, path, run_place)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])


def run(options: argparse.Namespace) -> Outcome:
    """Make the script of the parser that read this command."""
    import shtab

    for action in _actions(options.root):
        if action.type in _FILE_TYPES:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    script = shtab.complete(options.root, options.shell)
    return Outcome({"shell": options.shell, "script": script}, script)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of a parser and of all its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


COMMAND = Command(
    "completion",
    run,
    arguments,
    about="Print the script that completes commands, options and names of files in a shell.",
    more='For zsh, put `eval "$(tokendrop completion zsh)"` into ~/.zshrc, after compinit; for tcsh,'
    " `source ~/.tokendrop.tcsh` into ~/.tcshrc, after `tokendrop completion tcsh > ~/.tokendrop.tcsh`.",
    example="""echo 'eval "$(tokendrop completion bash)"' >> ~/.bashrc""",
)
