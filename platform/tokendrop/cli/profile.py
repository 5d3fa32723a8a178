"""`tokendrop profile`: measures this machine for `scaling.profile`."""

import argparse
from dataclasses import asdict
from pathlib import Path

from tokendrop.cli.arguments import add_job, path, whole
from tokendrop.cli.command import Command, Outcome
from tokendrop.config.load import dump, load_job
from tokendrop.errors import UserError
from tokendrop.output import count, log, table
from tokendrop.schedule.device import DeviceProfile


def arguments(parser: argparse.ArgumentParser) -> None:
    """JOB, and where its profile goes."""
    add_job(parser)
    parser.add_argument("--out", type=path, metavar="FILE", help="a new .yaml file (default NAME.profile.yaml)")
    parser.add_argument("--rounds", type=whole(1), default=3, help="interleaved repeats (default 3)")


def run(options: argparse.Namespace) -> Outcome:
    """Measure, and write the profile.

    Raises:
        UserError: the job is wrong or does not fit here, or --out is no new file.
    """
    config = load_job(options.job, options.overrides)
    out = options.out or Path(f"{config.name}.profile.yaml")
    if out.suffix not in (".yaml", ".yml") or out.exists() or not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: want a new .yaml file in a folder that exists")
    from tokendrop.bench.profile import measure_profile
    from tokendrop.launch.memory import check_memory

    check_memory(config)
    measured = measure_profile(config, name=out.name.removesuffix(out.suffix), rounds=options.rounds, log=log)
    out.write_text(dump(measured), encoding="utf-8")
    return Outcome({"file": str(out), "profile": asdict(measured)}, profile_text(measured, str(out)))


def profile_text(profile: DeviceProfile, path: str) -> str:
    """A measured device profile, and where it lies."""
    speed, rows = profile.speeds[0], list[list[str]]()
    for point in speed.points:
        share = speed.shape.flops(kept=point.kept_length, dropped_layers=speed.dropped_layers)
        share /= speed.shape.flops(kept=speed.shape.sequence_length, dropped_layers=0)
        achieved = speed.flops_per_s(share=share, micro_batch=point.micro_batch)
        rows.append([f"{point.kept_length}", f"{point.micro_batch}", f"{point.seconds:.4g}", count(achieved)])
    link, storage = profile.within_node, (profile.checkpoint_bytes_per_s, profile.restore_bytes_per_s or 0)
    return (
        f"{table(['kept length', 'micro batch', 'seconds', 'FLOP/s'], rows)}\n\n"
        f"all-reduce {count(link.bytes_per_s)}B/s, {link.latency_s * 1e6:.3g} us;"
        f" all-gather {count(link.gather_bytes_per_s or 0)}B/s\n"
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
