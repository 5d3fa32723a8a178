"""The command `tokendrop`: what the user may type."""

import argparse
import atexit
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from tokendrop import cli_arguments, commands, commands_bench, commands_data, commands_train
from tokendrop.arguments import Command, Parser, end_quietly, tell_no_secrets
from tokendrop.errors import UserError, first_line
from tokendrop.render import results_alone


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exit code 0 (done), 1 (run failed, data damaged), 2 (user's mistake), 130 (interrupted)."""
    from tokendrop.launch.loopback import close_to_others

    tell_no_secrets()
    try:
        options = parse(arguments)
        if options.run is not commands.submit:  # which shows another Ray the token of that
            close_to_others()
        with results_alone():
            options.run(options)
        sys.stdout.flush()
    except UserError as error:
        print(f"tokendrop: {' '.join(str(error).splitlines())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        end_quietly()
    except OSError as error:  # of storage or a network that is away
        print(f"tokendrop: {first_line(error)}", file=sys.stderr)
        sys.exit(1)
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
    root = Parser(
        prog="tokendrop", description="Pretrain transformers with random-LTD on Ray, and measure what it saves."
    )
    root.add_argument("--version", action="version", version=f"tokendrop {version('tokendrop')}")
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


GROUPS = {
    "cluster": "A Ray cluster on this machine that grows and shrinks by itself, for trying things.",
    "data": "Look at token shards, and audit what runs trained on.",
}

COMMANDS = (
    Command(
        "plan",
        commands.plan,
        cli_arguments.job,
        about="Print a run before it starts: segments, layer tokens, FLOPs, learning rate; with a profile, its cost.",
        example="tokendrop plan jobs/paper/gpt3_350m_ltd.yaml scaling.profile=a100-40g-8",
    ),
    Command(
        "profile",
        commands.profile,
        cli_arguments.profile,
        about="Measure what `scaling.profile` needs to choose workers: step times, links and disk of this machine.",
        example="tokendrop profile jobs/pretrain/quickstart.yaml --out here.yaml",
    ),
    Command(
        "prepare",
        commands.prepare,
        cli_arguments.job,
        about="Turn a job's corpus into packed token shards, streamed by Ray Data.",
        example="tokendrop prepare jobs/pretrain/quickstart.yaml",
    ),
    Command(
        "train",
        commands_train.train,
        cli_arguments.train,
        about="Pretrain by a job file, on this machine or on the Ray cluster at RAY_ADDRESS.",
        example="tokendrop train jobs/pretrain/quickstart.yaml scaling.workers=2 scaling.cpus_per_worker=1",
    ),
    Command(
        "compare",
        commands_train.compare,
        cli_arguments.compare,
        about="Train several jobs, one after the other, time their steps in turns, and print what each saves.",
        example="tokendrop compare jobs/pretrain/quickstart_baseline.yaml jobs/pretrain/quickstart.yaml",
    ),
    Command(
        "evaluate",
        commands.evaluate,
        cli_arguments.evaluate,
        about="Held-out loss and lm-eval tasks of a run or a checkpoint, with no token dropped; MLflow is told.",
        example="tokendrop evaluate runs/gpt --tasks lambada_openai,tasks/copa.yaml --limit 100",
    ),
    Command(
        "export",
        commands.export,
        cli_arguments.export,
        about="Write the model of a run or a checkpoint as a Hugging Face folder with the same logits.",
        example="tokendrop export runs/gpt --to gpt-hf",
    ),
    Command(
        "submit",
        commands.submit,
        cli_arguments.submit,
        about="Check a job, then run it on a Ray cluster: `ray job submit` with its log and its exit code.",
        example="tokendrop submit jobs/pretrain/quickstart.yaml --address http://127.0.0.1:8265",
    ),
    Command(
        "cluster up",
        commands.cluster_up,
        cli_arguments.cluster_up,
        about="Start a head without CPUs and nodes as they are needed; prints how to reach it.",
        example="tokendrop cluster up --nodes 1..4 --gpus-per-node 1",
    ),
    Command(
        "cluster status",
        commands.cluster_status,
        cli_arguments.nothing,
        about="Print its nodes, what they have in use and what is requested.",
        example="tokendrop cluster status --json",
    ),
    Command(
        "cluster down",
        commands.cluster_down,
        cli_arguments.nothing,
        about="Stop it, and every process that runs on it.",
        example="tokendrop cluster down",
    ),
    Command(
        "sync",
        commands.sync,
        cli_arguments.run_folder,
        about="Send MLflow what a run recorded while its server was away.",
        example="tokendrop sync runs/quickstart-random-ltd-20260101-120000",
    ),
    Command(
        "bench",
        commands_bench.bench,
        cli_arguments.bench,
        about="Measure, side by side in one run: step time by kept length, the platform, the data plane, elasticity.",
        example="tokendrop bench step --rounds 9",
    ),
    Command(
        "data audit",
        commands_data.audit,
        cli_arguments.run_folder,
        about="Prove from a run's ledger that each sample of each committed step was trained on, once.",
        more="Exit code 1 where not, with counts and the first places. A sample in a step that is not its own counts"
        " as missing from the one and repeated in the other. The order of samples needs the manifest of the run's"
        " token shards, not the shards.",
        example="tokendrop data audit runs/quickstart-random-ltd-20260101-120000",
    ),
    Command(
        "data show",
        commands_data.show,
        cli_arguments.show,
        about="Print a sample: its text, its token ids, and the documents that it is made of.",
        example="tokendrop data show runs/data/0123456789abcdef --sample 17",
    ),
    Command(
        "data stats",
        commands_data.stats,
        cli_arguments.shards,
        about="Count documents, tokens and bytes by set and by source, also while they are being prepared.",
        example="tokendrop data stats runs/data/0123456789abcdef",
    ),
    Command(
        "data verify",
        commands_data.verify,
        cli_arguments.shards,
        about="Read all token shards, compare them with their checksums, and name those that are damaged.",
        more="Exit code 1 where some are.",
        example="tokendrop data verify runs/data/0123456789abcdef",
    ),
)
