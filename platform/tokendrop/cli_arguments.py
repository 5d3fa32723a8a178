"""The arguments of each command."""

import argparse

from tokendrop.arguments import path, whole
from tokendrop.config.model import GptConfig


def job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="job file (YAML)")
    overrides(parser)


def overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", help="key=value overrides, such as train.length='500 steps' or data.sources[0].weight=2"
    )


def profile(parser: argparse.ArgumentParser) -> None:
    job(parser)
    parser.add_argument("--out", type=path, metavar="FILE", help="a new .yaml file (default NAME.profile.yaml)")
    parser.add_argument("--rounds", type=whole(1), default=3, help="interleaved repeats (default 3)")


def train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", help="job file (YAML); with --resume, the run's own when left out")
    overrides(parser)
    parser.add_argument("--resume", type=path, metavar="RUN", help="go on from the last checkpoint of this run folder")


def compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("jobs", nargs="+", help="job files (YAML), the baseline first")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key in every job")


def evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--tasks", metavar="A,B", help="names that lm-eval knows, or task files (.yaml)")
    parser.add_argument("--include", type=path, metavar="DIR", help="a folder of lm-eval task files")
    parser.add_argument("--limit", type=whole(1), metavar="N", help="documents of each task (default: all)")


def export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--to", type=path, required=True, metavar="DIR", help="a new folder")


def submit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="job file (YAML), below --working-dir")
    overrides(parser)
    parser.add_argument(
        "--address", help="the cluster's dashboard (default RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265)"
    )
    parser.add_argument("--working-dir", default=".", metavar="DIR", help="the folder to upload (default .)")
    parser.add_argument("--no-wait", dest="wait", action="store_false", help="return once the job is submitted")


def run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=path, metavar="RUN", help="run folder")


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
    parser.add_argument("path", type=path, metavar="PATH", help="folder of token shards, its manifest, or a run folder")


def show(parser: argparse.ArgumentParser) -> None:
    shards(parser)
    parser.add_argument(
        "--sample", type=whole(0, 2**63 - 1), required=True, metavar="ID", help="sample id, as ledgers have it"
    )
    parser.add_argument(
        "--split", choices=["train", "validation", "test"], default="train", help="where it is from (default train)"
    )


def bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=["step", "overhead", "data", "elastic"])
    parser.add_argument("overrides", nargs="*", help="data, elastic: key=value overrides of the job")
    parser.add_argument("--rounds", type=whole(1), default=7, help="interleaved repeats (default 7)")
    parser.add_argument("--preset", choices=list(GptConfig.PRESETS), help="step: model; by device when left out")
    parser.add_argument("--micro-batch", type=whole(1), default=8, help="step: sequences of one step (default 8)")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="step")
    parser.add_argument("--compile", action="store_true", help="step: torch.compile each layer")
    parser.add_argument("--job", type=path, help="overhead, data, elastic (default one of jobs/pretrain)")
    parser.add_argument("--resizes", type=whole(1), default=20, help="elastic: changes of workers (default 20)")
    parser.add_argument("--stretch", type=whole(1), default=30, help="elastic: steps between two of them (default 30)")
    parser.add_argument("--picture", type=path, metavar="FILE", help="elastic: draw its first run, as .svg or .png")
