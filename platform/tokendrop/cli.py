"""The command `tokendrop`: reads what the user typed, calls one function, prints what it returns."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.config.model import GptConfig
from tokendrop.errors import UserError
from tokendrop.render import bench_text, comparison_text, plan_result, plan_text, print_json, say

OVERRIDES = "key=value overrides, such as train.length='500 steps'"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exit code 0 (done), 1 (the run failed), 2 (what the user wrote is wrong)."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except UserError as error:
        print(f"tokendrop: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("tokendrop: stopped", file=sys.stderr)
        sys.exit(130)


def plan(options: argparse.Namespace) -> None:
    config = load_job(options.job, options.overrides)
    if options.json:
        print_json({"name": config.name, **plan_result(config.plan())})
    else:
        print(plan_text(config.name, config.plan()))


def prepare(options: argparse.Namespace) -> None:
    from tokendrop.data.pipeline import prepare
    from tokendrop.data.shards import read_manifest
    from tokendrop.launch.cluster import connect

    config = load_job(options.job, options.overrides)
    connect()
    folder = prepare(
        config, progress=lambda documents, tokens: say(f"packed   {documents:,} documents, {tokens:,} tokens")
    )
    manifest = read_manifest(folder)
    rows = {split: sum(shard.rows for shard in getattr(manifest, split)) for split in ("train", "validation")}
    if options.json:
        print_json(
            {"folder": str(folder), "documents": manifest.documents, "tokens": manifest.tokens, "rows": rows}
        )
    else:
        print(
            f"{folder}: {manifest.documents:,} documents, {manifest.tokens:,} tokens;"
            f" {rows['train']:,} training and {rows['validation']:,} validation rows"
        )


def train(options: argparse.Namespace) -> None:
    if options.resume is None and options.job is None:
        raise UserError("train: want a job file, or --resume RUN")
    job = options.job
    if options.resume is not None and (job is None or "=" in job):
        from tokendrop.track.run_folder import JOB, open_run_folder

        open_run_folder(options.resume)
        options.overrides = [*([job] if job else []), *options.overrides]
        job = options.resume / JOB
    config = load_job(job, options.overrides)
    result = trained(config, resume=options.resume)
    if options.json:
        print_json(result)
    else:
        print(comparison_text([result], [config.name]))
        print(
            f"layer tokens saved: {result['layer_token_saving']:.1%}   FLOPs saved: {result['flops_saving']:.1%}"
        )
        print(where([result], config))


def compare(options: argparse.Namespace) -> None:
    configs = [load_job(job, options.set) for job in options.jobs]
    results = [trained(config) for config in configs]
    if options.json:
        print_json({"runs": results})
    else:
        print("\n" + comparison_text(results, [config.name for config in configs]))
        print(where(results, configs[0]))


def bench(options: argparse.Namespace) -> None:
    from tokendrop.bench.overhead import bench_overhead
    from tokendrop.bench.step import bench_step

    if options.name == "step":
        result = bench_step(
            preset=options.preset,
            micro_batch=options.micro_batch,
            precision=options.precision,
            compiled=options.compile,
            rounds=options.rounds,
            say=say,
        )
    else:
        result = bench_overhead(options.job, steps=options.steps, rounds=options.rounds, say=say)
    if options.json:
        print_json(result)
    else:
        print(bench_text(result))


def trained(config: ExperimentConfig, *, resume: Path | None = None) -> dict[str, Any]:
    """Train on Ray; a run that fails ends the command with one line and exit code 1."""
    from ray.train import TrainingFailedError

    from tokendrop.launch.trainer import run_training

    try:
        return run_training(config, resume=resume)
    except TrainingFailedError as error:
        print(
            f"tokendrop: the run failed more often than scaling.max_restarts={config.scaling.max_restarts}",
            file=sys.stderr,
        )
        print(error, file=sys.stderr)
        sys.exit(1)


def where(results: Sequence[dict[str, Any]], config: ExperimentConfig) -> str:
    """Where to look at what was made."""
    lines = ["", *(f"run folder  {result['run']}" for result in results)]
    if config.track.uri:
        lines.append(
            f"curves      .venv/bin/mlflow ui --backend-store-uri {config.track.uri}   then http://127.0.0.1:5000"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="tokendrop",
        description="Pretrain transformers with random-LTD on Ray, and measure what it saves.",
    )
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], None], about: str, example: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"example: {example}",
        )
        added.add_argument("--json", action="store_true", help="print one JSON object on standard output")
        added.set_defaults(run=run)
        return added

    one = command(
        "plan",
        plan,
        "Print a run before it starts: segments, layer tokens, FLOPs, learning rate.",
        "tokendrop plan jobs/paper/gpt3_350m_ltd.yaml train.global_batch=512",
    )
    one.add_argument("job", help="job file (YAML)")
    one.add_argument("overrides", nargs="*", help=OVERRIDES)

    one = command(
        "prepare",
        prepare,
        "Turn a job's corpus into packed token shards, streamed by Ray Data.",
        "tokendrop prepare jobs/pretrain/quickstart.yaml",
    )
    one.add_argument("job", help="job file (YAML)")
    one.add_argument("overrides", nargs="*", help=OVERRIDES)

    one = command(
        "train",
        train,
        "Pretrain by a job file, on this machine or on the Ray cluster at RAY_ADDRESS.",
        "tokendrop train jobs/pretrain/quickstart.yaml scaling.workers=2 scaling.cpus_per_worker=1",
    )
    one.add_argument("job", nargs="?", help="job file (YAML); with --resume, the run's own when left out")
    one.add_argument("overrides", nargs="*", help=OVERRIDES)
    one.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on from the last checkpoint of this run folder"
    )

    one = command(
        "compare",
        compare,
        "Train several jobs, one after the other, and print what each saves against the first.",
        "tokendrop compare jobs/pretrain/quickstart_baseline.yaml jobs/pretrain/quickstart.yaml",
    )
    one.add_argument("jobs", nargs="+", help="job files (YAML), the baseline first")
    one.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key in every job"
    )

    one = command(
        "bench",
        bench,
        "Measure, side by side in one run: step time by kept length, or what the platform costs.",
        "tokendrop bench step --rounds 9",
    )
    one.add_argument("name", choices=["step", "overhead"])
    one.add_argument("--rounds", type=int, default=7, help="interleaved repeats (default 7)")
    one.add_argument("--preset", choices=list(GptConfig.PRESETS), help="step: model; by device when left out")
    one.add_argument("--micro-batch", type=int, default=8, help="step: sequences of one step (default 8)")
    one.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="step")
    one.add_argument("--compile", action="store_true", help="step: torch.compile each layer")
    one.add_argument("--job", type=Path, default=Path("jobs/pretrain/quickstart_baseline.yaml"), help="overhead")
    one.add_argument("--steps", type=int, default=40, help="overhead: steps of one measurement (default 40)")
    return root
