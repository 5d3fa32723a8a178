"""The command `tokendrop`: what the user may type."""

import argparse
import atexit
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokendrop import commands, commands_bench, commands_data
from tokendrop.config.model import GptConfig
from tokendrop.errors import UserError


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exit code 0 (done), 1 (run failed, data damaged), 2 (user's mistake), 130 (interrupted)."""
    options = parse(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except UserError as error:
        print(f"tokendrop: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever read the output, `| head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("tokendrop: stopped", file=sys.stderr)
        # what ends at the exit, a Ray that was started here above all, but no destructors: those of a Ray that had
        # just begun to start crash
        atexit._run_exitfuncs()
        os._exit(130)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the user typed; argparse alone takes no override after an option: `JOB --resume RUN key=value`."""
    root = parser()
    options, left = root.parse_known_args(arguments)
    if any(text.startswith("-") for text in left) or (left and not hasattr(options, "overrides")):
        root.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        options.overrides = [*options.overrides, *left]
    return options


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="tokendrop", description="Pretrain transformers with random-LTD on Ray, and measure what it saves."
    )
    groups = {"": root.add_subparsers(title="commands", required=True, metavar="COMMAND")}
    for command in COMMANDS:
        above, _, name = command.name.rpartition(" ")
        if above not in groups:
            group = groups[""].add_parser(above, help=GROUPS[above], description=GROUPS[above])
            groups[above] = group.add_subparsers(title="commands", required=True, metavar="COMMAND")
        description = f"{command.about} {command.more}".rstrip()
        example = f"example: {command.example}"
        added = groups[above].add_parser(name, help=command.about, description=description, epilog=example)
        command.arguments(added)
        added.add_argument("--json", action="store_true", help="print one JSON object on standard output")
        added.set_defaults(run=command.run)
    return root


def job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="job file (YAML)")
    overrides(parser)


def overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", help="key=value overrides, such as train.length='500 steps'")


def profile(parser: argparse.ArgumentParser) -> None:
    job(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="a new .yaml file (default NAME.profile.yaml)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repeats (default 3)")


def train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", help="job file (YAML); with --resume, the run's own when left out")
    overrides(parser)
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on from the last checkpoint of this run folder")


def compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("jobs", nargs="+", help="job files (YAML), the baseline first")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key in every job")


def evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--tasks", default="", metavar="A,B", help="names that lm-eval knows, or task files (.yaml)")
    parser.add_argument("--include", type=Path, metavar="DIR", help="a folder of lm-eval task files")
    parser.add_argument("--limit", type=int, metavar="N", help="documents of each task (default: all)")


def export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")


def submit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="job file (YAML), below --working-dir")
    overrides(parser)
    parser.add_argument(
        "--address", help="the cluster's dashboard (default RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265)"
    )
    parser.add_argument("--working-dir", default=".", metavar="DIR", help="the folder to upload (default .)")
    parser.add_argument("--no-wait", dest="wait", action="store_false", help="return once the job is submitted")


def run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")


def cluster_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", default="0..4", metavar="N..M", help="at least N nodes, at most M (default 0..4)")
    parser.add_argument("--cpus-per-node", type=int, default=2, metavar="N", help="what a node counts (default 2)")
    parser.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="pretended GPUs (default 0)")
    parser.add_argument(
        "--idle-timeout", type=float, default=10, metavar="S", help="an idle node goes after S seconds (default 10)"
    )
    parser.add_argument("--port", type=int, help="of RAY_ADDRESS (default 6399, or any that is free)")


def nothing(parser: argparse.ArgumentParser) -> None:
    """For commands that take no arguments."""


def shards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of token shards, its manifest, or a run folder")


def show(parser: argparse.ArgumentParser) -> None:
    shards(parser)
    parser.add_argument("--sample", type=int, required=True, metavar="ID", help="sample id, as ledgers have it")
    parser.add_argument(
        "--split", choices=["train", "validation", "test"], default="train", help="where it is from (default train)"
    )


def bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=["step", "overhead", "data", "elastic"])
    parser.add_argument("overrides", nargs="*", help="data, elastic: key=value overrides of the job")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved repeats (default 7)")
    parser.add_argument("--preset", choices=list(GptConfig.PRESETS), help="step: model; by device when left out")
    parser.add_argument("--micro-batch", type=int, default=8, help="step: sequences of one step (default 8)")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="step")
    parser.add_argument("--compile", action="store_true", help="step: torch.compile each layer")
    parser.add_argument("--job", type=Path, help="overhead, data, elastic (default one of jobs/pretrain)")
    parser.add_argument("--resizes", type=int, default=20, help="elastic: changes of workers (default 20)")
    parser.add_argument("--stretch", type=int, default=30, help="elastic: steps between two of them (default 30)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="elastic: draw its first run, as .svg or .png")


GROUPS = {
    "cluster": "A Ray cluster on this machine that grows and shrinks by itself, for trying things.",
    "data": "Look at token shards, and audit what runs trained on.",
}

COMMANDS = (
    Command(
        "plan",
        commands.plan,
        job,
        about="Print a run before it starts: segments, layer tokens, FLOPs, learning rate; with a profile, its cost.",
        example="tokendrop plan jobs/paper/gpt3_350m_ltd.yaml scaling.profile=a100-40g-8",
    ),
    Command(
        "profile",
        commands.profile,
        profile,
        about="Measure what `scaling.profile` needs to choose workers: step times, links and disk of this machine.",
        example="tokendrop profile jobs/pretrain/quickstart.yaml --out here.yaml",
    ),
    Command(
        "prepare",
        commands.prepare,
        job,
        about="Turn a job's corpus into packed token shards, streamed by Ray Data.",
        example="tokendrop prepare jobs/pretrain/quickstart.yaml",
    ),
    Command(
        "train",
        commands.train,
        train,
        about="Pretrain by a job file, on this machine or on the Ray cluster at RAY_ADDRESS.",
        example="tokendrop train jobs/pretrain/quickstart.yaml scaling.workers=2 scaling.cpus_per_worker=1",
    ),
    Command(
        "compare",
        commands.compare,
        compare,
        about="Train several jobs, one after the other, and print what each saves against the first.",
        example="tokendrop compare jobs/pretrain/quickstart_baseline.yaml jobs/pretrain/quickstart.yaml",
    ),
    Command(
        "evaluate",
        commands.evaluate,
        evaluate,
        about="Held-out loss and lm-eval tasks of a run or a checkpoint, with no token dropped; MLflow is told.",
        example="tokendrop evaluate runs/gpt --tasks lambada_openai,tasks/copa.yaml --limit 100",
    ),
    Command(
        "export",
        commands.export,
        export,
        about="Write the model of a run or a checkpoint as a Hugging Face folder with the same logits.",
        example="tokendrop export runs/gpt --to gpt-hf",
    ),
    Command(
        "submit",
        commands.submit,
        submit,
        about="Check a job, then run it on a Ray cluster: `ray job submit` with its log and its exit code.",
        example="tokendrop submit jobs/pretrain/quickstart.yaml --address http://127.0.0.1:8265",
    ),
    Command(
        "cluster up",
        commands.cluster_up,
        cluster_up,
        about="Start a head without CPUs and nodes as they are needed; prints how to reach it.",
        example="tokendrop cluster up --nodes 1..4 --gpus-per-node 1",
    ),
    Command(
        "cluster status",
        commands.cluster_status,
        nothing,
        about="Print its nodes, what they have in use and what is requested.",
        example="tokendrop cluster status --json",
    ),
    Command(
        "cluster down",
        commands.cluster_down,
        nothing,
        about="Stop it, and every process that runs on it.",
        example="tokendrop cluster down",
    ),
    Command(
        "sync",
        commands.sync,
        run_folder,
        about="Send MLflow what a run recorded while its server was away.",
        example="tokendrop sync runs/quickstart-random-ltd-20260101-120000",
    ),
    Command(
        "bench",
        commands_bench.bench,
        bench,
        about="Measure, side by side in one run: step time by kept length, the platform, the data plane, elasticity.",
        example="tokendrop bench step --rounds 9",
    ),
    Command(
        "data audit",
        commands_data.audit,
        run_folder,
        about="Prove from a run's ledger that each sample of each committed step was trained on, once.",
        more="Exit code 1 where not, with counts and the first places. A sample in a step that is not its own counts"
        " as missing from the one and repeated in the other. The order of samples needs the manifest of the run's"
        " token shards, not the shards.",
        example="tokendrop data audit runs/quickstart-random-ltd-20260101-120000",
    ),
    Command(
        "data show",
        commands_data.show,
        show,
        about="Print a sample: its text, its token ids, and the documents that it is made of.",
        example="tokendrop data show runs/data/0123456789abcdef --sample 17",
    ),
    Command(
        "data stats",
        commands_data.stats,
        shards,
        about="Count documents, tokens and bytes by set and by source, also while they are being prepared.",
        example="tokendrop data stats runs/data/0123456789abcdef",
    ),
    Command(
        "data verify",
        commands_data.verify,
        shards,
        about="Read all token shards, compare them with their checksums, and name those that are damaged.",
        more="Exit code 1 where some are.",
        example="tokendrop data verify runs/data/0123456789abcdef",
    ),
)
