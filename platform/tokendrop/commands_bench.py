"""`tokendrop bench NAME`: each measurement imports only what it measures."""

import argparse
import sys
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from tokendrop.errors import UserError
from tokendrop.render import bench_text, print_json, print_text, say


def bench(options: argparse.Namespace) -> None:
    if options.overrides and options.name not in ("data", "elastic"):
        raise UserError(f"bench {options.name}: takes no overrides, got {' '.join(options.overrides)}")
    try:
        result = _NAMES[options.name](options)
    except CalledProcessError as error:  # which has said why
        say(f"tokendrop: bench {options.name}: a process of it ended with exit code {error.returncode}: {error.cmd}")
        sys.exit(1)
    if options.json:
        print_json(result)
    else:
        print_text(bench_text(result))


def _step(options: argparse.Namespace) -> dict[str, Any]:
    """With torch, numpy and PyYAML alone."""
    from tokendrop.bench.step import bench_step

    return bench_step(
        preset=options.preset,
        micro_batch=options.micro_batch,
        precision=options.precision,
        compiled=options.compile,
        rounds=options.rounds,
        say=say,
    )


def _overhead(options: argparse.Namespace) -> dict[str, Any]:
    from tokendrop.bench.overhead import bench_overhead

    return bench_overhead(_job(options, "bench"), rounds=options.rounds, say=say)


def _data(options: argparse.Namespace) -> dict[str, Any]:
    from tokendrop.bench.data import bench_data

    return bench_data(_job(options, "bench"), options.overrides, rounds=options.rounds, say=say)


def _elastic(options: argparse.Namespace) -> dict[str, Any]:
    from tokendrop.bench.elastic import bench_elastic

    return bench_elastic(
        _job(options, "elastic"),
        options.overrides,
        resizes=options.resizes,
        stretch=options.stretch,
        picture=options.picture,
        say=say,
    )


def _job(options: argparse.Namespace, usual: str) -> Path:
    return options.job or Path("jobs", "pretrain", f"{usual}.yaml")


_NAMES = {"step": _step, "overhead": _overhead, "data": _data, "elastic": _elastic}
