"""What each command does: calls one function and prints what it returns.

Heavy libraries are imported where they are used, so that `plan` and `--help` answer at once, without torch or Ray.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tokendrop.config.files import unusable_path
from tokendrop.config.load import dump, load_job
from tokendrop.errors import UserError
from tokendrop.render import (
    addresses_text,
    cluster_text,
    plan_result,
    plan_text,
    print_json,
    print_text,
    profile_text,
    say,
)


def plan(options: argparse.Namespace) -> None:
    config = load_job(options.job, options.overrides)
    plan, fixed, profile = config.plan(), config.plan_fixed(), config.scaling.profile
    if options.json:
        print_json({"name": config.name, **plan_result(plan, fixed=fixed, profile=profile)})
    else:
        print_text(plan_text(config.name, plan, fixed=fixed, profile=profile))


def profile(options: argparse.Namespace) -> None:
    config = load_job(options.job, options.overrides)
    out = options.out or Path(f"{config.name}.profile.yaml")
    if out.suffix not in (".yaml", ".yml") or out.exists() or not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: want a new .yaml file in a folder that exists")
    from tokendrop.bench.profile import measure_profile
    from tokendrop.launch.memory import check_memory

    check_memory(config)
    measured = measure_profile(config, name=out.name.removesuffix(out.suffix), rounds=options.rounds, say=say)
    out.write_text(dump(measured), encoding="utf-8")
    if options.json:
        print_json({"file": str(out), "profile": asdict(measured)})
    else:
        print_text(profile_text(measured, str(out)))


def prepare(options: argparse.Namespace) -> None:
    from ray.exceptions import RayError

    from tokendrop.data.manifest import read_header
    from tokendrop.data.pipeline import prepare
    from tokendrop.data.shards import SPLITS
    from tokendrop.launch.cluster import connect
    from tokendrop.launch.head_watch import HeadWatch
    from tokendrop.launch.prepare import cause_of
    from tokendrop.launch.results import with_absolute_paths
    from tokendrop.launch.stopping import stopping_in_time
    from tokendrop.launch.watch import prepare_line

    config = with_absolute_paths(load_job(options.job, options.overrides))
    with stopping_in_time():
        connect()
        try:
            with HeadWatch(), prepare_line() as progress:
                folder = prepare(config, progress=progress)
        except (RayError, OSError) as error:
            say(f"tokendrop: the preparation failed ({cause_of(error)}); what is committed stays for the next attempt")
            sys.exit(1)
    header = read_header(folder)
    rows = dict(zip(SPLITS, header.rows, strict=True))
    counts = {"documents": header.documents, "rejected": header.rejected, "tokens": header.tokens}
    if options.json:
        print_json({"folder": str(folder), **counts, "rows": rows})
    else:
        parts = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        print_text(f"{folder}: {parts}; rows: " + ", ".join(f"{count:,} {split}" for split, count in rows.items()))


def sync(options: argparse.Namespace) -> None:
    from tokendrop.track.mlflow import MlflowMirror
    from tokendrop.track.run_folder import open_run_folder

    config, _ = open_run_folder(options.run_folder)
    if config.track.uri is None:
        raise UserError(f"{options.run_folder}: this run is not tracked (track.uri is null)")
    mirror = MlflowMirror(options.run_folder, config)
    try:
        mirror.sync()
    except UserError:
        raise
    except Exception as error:  # MLflow's clients raise whatever their transport does
        say(f"tokendrop: {config.track.uri} can't be reached ({error})")
        sys.exit(1)
    if options.json:
        print_json({"mlflow_run_id": mirror.run_id})
    else:
        print_text(f"MLflow run {mirror.run_id} at {config.track.uri} has everything")


def submit(options: argparse.Namespace) -> None:
    from tokendrop.launch.submit import submit

    result = submit(
        options.job,
        options.overrides,
        address=options.address,
        working_dir=options.working_dir,
        wait=options.wait,
        as_json=options.json,
    )
    if options.json:
        print_json(result)
    sys.exit(result["exit_code"])


def cluster_up(options: argparse.Namespace) -> None:
    from tokendrop.launch.local_cluster import start
    from tokendrop.launch.local_head import ClusterError, ClusterSize

    size = ClusterSize.parse(
        options.nodes,
        cpus_per_node=options.cpus_per_node,
        gpus_per_node=options.gpus_per_node,
        idle_timeout_s=options.idle_timeout,
    )
    try:
        cluster = start(size, port=options.port)
    except ClusterError as error:
        say(f"tokendrop: {error}")
        sys.exit(1)
    if options.json:
        print_json({"address": cluster.address, "dashboard": cluster.dashboard, "environment": cluster.environment})
    else:
        print_text(addresses_text(cluster.dashboard, cluster.environment))


def cluster_status(options: argparse.Namespace) -> None:
    from tokendrop.launch.local_cluster import find
    from tokendrop.launch.local_head import ClusterError, describe

    cluster = find()
    try:
        status = {"up": True, **describe(cluster)} if cluster else {"up": False}
    except ClusterError as error:
        say(f"tokendrop: {error}")
        sys.exit(1)
    if options.json:
        print_json(status)
    else:
        print_text(cluster_text(status) if cluster else "no local cluster is up; 'tokendrop cluster up' starts one")


def cluster_down(options: argparse.Namespace) -> None:
    from tokendrop.launch.local_cluster import stop
    from tokendrop.launch.local_head import ClusterError

    try:
        stopped = stop()
    except ClusterError as error:
        say(f"tokendrop: {error}")
        sys.exit(1)
    if options.json:
        print_json({"stopped": stopped.address if stopped else None})
    else:
        print_text(f"stopped {stopped.address}" if stopped else "no local cluster was up")


def evaluate(options: argparse.Namespace) -> None:
    with needs_extra("eval"):
        from tokendrop.evaluate.evaluation import evaluate_run, evaluation_text

    tasks = [task.strip() for task in (options.tasks or "").split(",") if task.strip()]
    if options.tasks is not None and not tasks:
        raise UserError(f"--tasks: want names such as lambada_openai,piqa; got {options.tasks!r}")
    if overlong := [task for task in tasks if unusable_path(task)]:
        raise UserError(f"--tasks: {unusable_path(overlong[0])}")
    result = evaluate_run(options.path, tasks, include=options.include, limit=options.limit)
    if options.json:
        print_json(result)
    else:
        print_text(evaluation_text(result))


def export(options: argparse.Namespace) -> None:
    with needs_extra("eval"):
        from tokendrop.evaluate.export import export_checkpoint

    folder = export_checkpoint(options.path, options.to)
    if options.json:
        print_json({"folder": str(folder)})
    else:
        print_text(f"{folder}: a GPT-2 for transformers' AutoModelForCausalLM.from_pretrained({str(folder)!r})")


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around imports: UserError where a package of one of our extras is missing; bars on terminals alone."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # tqdm reads it when it is imported
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed; pip install 'tokendrop[{extra}]'") from None
