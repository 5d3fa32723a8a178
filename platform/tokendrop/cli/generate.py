"""`tokendrop generate`: what a run's model writes after a text."""

import argparse
import sys

from tokendrop.cli.arguments import number, path, whole
from tokendrop.cli.command import Command, Outcome
from tokendrop.output import log, print_text


def arguments(parser: argparse.ArgumentParser) -> None:
    """Whose model writes, after what, and how it chooses."""
    parser.add_argument("path", type=path, metavar="RUN_OR_CHECKPOINT")
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
    writer = Writer(options.path)

    def write(prompt: str) -> str:
        return prompt + writer.write(prompt, tokens=options.tokens, sampling=sampling, seed=options.seed)

    if options.prompt is not None:
        text = write(options.prompt)
        return Outcome({"texts": [text]}, text, is_corpus=True)
    if sys.stdin.isatty():
        log("one text a line; Ctrl-D ends")
    texts: list[str] = []
    for line in sys.stdin:
        texts.append(write(line.rstrip("\n")))
        if not options.json:
            print_text(texts[-1], is_corpus=True)
    return Outcome({"texts": texts}, is_corpus=True)


COMMAND = Command(
    "generate",
    run,
    arguments,
    about="Write what follows a text, or each line typed, by the model of a run or a checkpoint.",
    example="tokendrop generate runs/gpt --prompt 'The function returns' --temperature 0.8 --top-p 0.95",
    extra="eval",
)
