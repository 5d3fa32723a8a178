"""`tokendrop profile`: measures this machine for `scaling.profile`, or takes what `tokendrop bench device` measured."""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tokendrop.cli.arguments import add_overrides, job_file, path, whole
from tokendrop.cli.command import Command, Outcome
from tokendrop.config.load import dump, load_job
from tokendrop.config.run import ScalingConfig
from tokendrop.errors import UserError
from tokendrop.output import count, log, table
from tokendrop.schedule.device import DeviceProfile


def arguments(parser: argparse.ArgumentParser) -> None:
    """JOB or a measurement, and where its profile goes."""
    parser.add_argument("job", type=job_file, nargs="?", help="job file (YAML); with --from, none")
    add_overrides(parser)
    parser.add_argument("--out", type=path, metavar="FILE", help="a new .yaml file (default NAME.profile.yaml)")
    parser.add_argument("--rounds", type=whole(1), default=3, help="interleaved repeats (default 3)")
    parser.add_argument("--resizes", type=path, metavar="RUN", help="take what a resize costs from a run that had some")
    parser.add_argument("--nodes", action="store_true", help="measure the link between two nodes of RAY_ADDRESS too")
    parser.add_argument(
        "--from", dest="measured", type=path, metavar="FILE", help="take step times from this file of bench device"
    )
    parser.add_argument(
        "--like", default="h200-8", metavar="PROFILE", help="with --from, whose links and storage (default h200-8)"
    )


def run(options: argparse.Namespace) -> Outcome:
    """Measure, or read what was measured, and write the profile.

    Raises:
        UserError: the job is wrong or does not fit here, the file is no measurement, or --out is no new file.
    """
    if (options.job is None) == (options.measured is None):
        raise UserError("profile: want a job file, or --from FILE and no job")
    if options.measured is not None and (options.resizes is not None or options.nodes):
        raise UserError("profile: --resizes and --nodes go with a job, not with --from")
    if options.measured is not None:
        return _from_measured(options.measured, options.like, options.out)
    config = load_job(options.job, options.overrides)
    out = _new_file(options.out or Path(f"{config.name}.profile.yaml"))
    from tokendrop.bench.profile import measure_profile, timed_job
    from tokendrop.bench.resizes import plan_with_resizes, with_resizes
    from tokendrop.launch.memory import check_memory

    check_memory(timed_job(config))
    resizes: Path | None = options.resizes
    resized = None if resizes is None else plan_with_resizes(resizes)
    add_node_link = _node_link_of(config.scaling) if options.nodes else None
    measured = measure_profile(config, name=out.name.removesuffix(out.suffix), rounds=options.rounds, log=log)
    if add_node_link is not None:
        measured = add_node_link(measured)
    if resizes is not None and resized is not None:
        measured = with_resizes(measured, resized, resizes)
    return _written(measured, out)


def _node_link_of(scaling: ScalingConfig) -> Callable[[DeviceProfile], DeviceProfile]:
    """Measure the link between two nodes; returns what puts it into a profile."""
    from tokendrop.bench.node_link import measure_node_link, with_node_link  # here, for Ray takes seconds

    link, backend = measure_node_link(scaling, log=log)
    return partial(with_node_link, link=link, backend=backend)


def _from_measured(measured: Path, like: str, out: Path | None) -> Outcome:
    out = _new_file(out or Path(f"{measured.stem}.profile.yaml"))
    from tokendrop.bench.device_profile import profile_from

    return _written(profile_from(measured, like=like, name=out.name.removesuffix(out.suffix)), out)


def _new_file(out: Path) -> Path:
    if out.suffix not in (".yaml", ".yml") or out.exists() or not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: want a new .yaml file in a folder that exists")
    return out


def _written(profile: DeviceProfile, out: Path) -> Outcome:
    out.write_text(dump(profile), encoding="utf-8")
    return Outcome({"file": str(out), "profile": asdict(profile)}, profile_text(profile, str(out)))


def profile_text(profile: DeviceProfile, path: str) -> str:
    """A measured device profile, and where it lies."""
    rows: list[list[str]] = []
    for speed, point in ((one, point) for one in profile.speeds for point in one.points):
        share = speed.shape.flops(kept=point.kept_length, dropped_layers=speed.dropped_layers)
        share /= speed.shape.flops(kept=speed.shape.sequence_length, dropped_layers=0)
        achieved = speed.flops_per_s(share=share, micro_batch=point.micro_batch)
        cells = [f"{point.kept_length}", f"{point.micro_batch}", f"{point.seconds:.4g}", count(achieved)]
        rows.append([speed.model, *cells])
    storage = profile.checkpoint_bytes_per_s, profile.restore_bytes_per_s or profile.checkpoint_bytes_per_s
    links = {"within a node": profile.within_node}
    if profile.between_nodes != profile.within_node:
        links["between nodes"] = profile.between_nodes
    told = [
        f"{where}: all-reduce {count(link.bytes_per_s)}B/s, {link.latency_s * 1e6:.3g} us;"
        f" all-gather {count(link.gather_bytes_per_s or link.bytes_per_s)}B/s\n"
        for where, link in links.items()
    ]
    return (
        f"{table(['model', 'kept length', 'micro batch', 'seconds', 'FLOP/s'], rows)}\n\n"
        f"{''.join(told)}"
        f"all devices of a node at work: {profile.full_node_slowdown:.3g} times as long a step\n"
        f"checkpoint {count(storage[0])}B/s, restored {count(storage[1])}B/s; new workers {profile.resize_s:.3g} s\n"
        f"{path}   for scaling.profile"
    )


COMMAND = Command(
    "profile",
    run,
    arguments,
    about="Measure what `scaling.profile` needs to choose workers: step times, links and disk of this machine.",
    example="tokendrop profile jobs/pretrain/quickstart.yaml --out here.yaml",
)
