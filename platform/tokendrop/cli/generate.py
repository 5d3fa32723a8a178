"""`tokendrop generate`: what a run's model writes after a text."""

import argparse
import sys
from collections.abc import Iterator
from typing import TextIO

from tokendrop.cli.arguments import number, run_here, run_place, whole
from tokendrop.cli.command import Command, Outcome
from tokendrop.errors import UserError
from tokendrop.output import log, print_text


def arguments(parser: argparse.ArgumentParser) -> None:
    """Whose model writes, after what, and how it chooses."""
    parser.add_argument("path", type=run_place, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--prompt", metavar="TEXT", help="what to go on with; without it, each line typed")
    parser.add_argument("--tokens", type=whole(1), default=100, metavar="N", help="at most (default 100)")
    parser.add_argument("--temperature", type=number(0, 100), default=1.0, help="0: the likeliest always (default 1)")
    parser.add_argument("--top-k", type=whole(1), metavar="N", help="only the N likeliest tokens")
    parser.add_argument("--top-p", type=number(0, 1), default=1.0, help="only the likeliest with this probability")
    parser.add_argument("--seed", type=whole(0), default=1234)


def run(options: argparse.Namespace) -> Outcome:
    """Go on with the prompt, or with each line of standard input.

    Raises:
        UserError: there is no checkpoint, or its model does not predict the next token.
    """
    from tokendrop.evaluate.generate import Sampling, Writer

    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    writer = Writer(run_here(options.path))

    def write(prompt: str) -> str:
        _check_text(prompt)
        return prompt + writer.write(prompt, tokens=options.tokens, sampling=sampling, seed=options.seed)

    if options.prompt is not None:
        text = write(options.prompt)
        return Outcome({"texts": [text]}, text, is_corpus=True)
    if sys.stdin.isatty():
        log("one text a line; Ctrl-D ends")
    texts: list[str] = []
    for line in _lines(sys.stdin):
        texts.append(write(line))
        if not options.json:
            print_text(texts[-1], is_corpus=True)
    return Outcome({"texts": texts}, is_corpus=True)


def _lines(stream: TextIO) -> Iterator[str]:
    try:
        for line in stream:
            yield line.rstrip("\n")
    except UnicodeDecodeError:
        raise UserError("standard input: want text in UTF-8") from None


def _check_text(text: str) -> None:
    """Bytes of a command line that are not UTF-8 come as halves of characters, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"want a text in UTF-8, got {text[:80]!r}") from None


COMMAND = Command(
    "generate",
    run,
    arguments,
    about="Write what follows a text, or each line typed, by the model of a run or a checkpoint.",
    example="tokendrop generate runs/gpt --prompt 'The function returns' --temperature 0.8 --top-p 0.95",
    extra="eval",
)
