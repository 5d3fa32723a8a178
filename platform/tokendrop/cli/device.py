"""`tokendrop bench device`: what random-LTD saves of the time on the device at hand."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokendrop.cli.arguments import number, path, whole
from tokendrop.cli.command import Command, Outcome
from tokendrop.errors import UserError
from tokendrop.output import count, json_text, log, table

_HEAD = ["model", "kept", "step ms", "time", "FLOPs", "tokens/s", "MFU", "memory", "gather + combine", "draw", "grown"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, and where it goes."""
    parser.add_argument("--presets", metavar="A,B", help="models, such as gpt3-125m,gpt3-350m; by device when left out")
    parser.add_argument("--minutes", type=number(0.01, 1440), default=9, help="time for all of it (default 9)")
    parser.add_argument("--micro-batch", type=whole(1, 4096), help="sequences of one step; by model when left out")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile layers, and the plain model; by device when left out",
    )
    help = "time each model in fp8 too, beside without (train.fp8); wants tokendrop[fp8], and emulates it on a CPU"
    parser.add_argument("--fp8", choices=["tensorwise", "rowwise"], help=help)
    parser.add_argument("--static", action="store_true", help="time each model with train.compile: static too")
    parser.add_argument("--cuda-graphs", action="store_true", help="time each model with train.cuda_graphs too")
    parser.add_argument("--rounds", type=whole(3, 1000), default=9, help="interleaved repeats, at most (default 9)")
    parser.add_argument(
        "--out", type=path, default=Path("device.json"), metavar="FILE", help="a new .json file (default device.json)"
    )


def run(options: argparse.Namespace) -> Outcome:
    """Measure with torch, numpy and PyYAML alone, and write the result after each model.

    Raises:
        UserError: a preset is none, --out is no new file, or the device has no such precision, fp8 or CUDA graphs.
    """
    out: Path = options.out
    if out.suffix != ".json" or out.exists() or not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: want a new .json file in a folder that exists")
    from tokendrop.bench.device import Wanted, bench_device, read_presets

    wanted = Wanted(
        presets=read_presets(options.presets) if options.presets is not None else (),
        minutes=options.minutes,
        micro_batch=options.micro_batch,
        precision=options.precision,
        compiled=options.compile,
        rounds=options.rounds,
        fp8=options.fp8,
        static=options.static,
        cuda_graphs=options.cuda_graphs,
    )
    result = bench_device(wanted, log=log, save=lambda so_far: _write(out, so_far))
    return Outcome(result | {"file": str(out)}, f"{device_text(result)}\n{out}")


def _write(out: Path, result: Mapping[str, Any]) -> None:
    out.write_text(json_text(result), encoding="utf-8")


def device_text(result: Mapping[str, Any]) -> str:
    """One table of all models and kept lengths, and a line on each model."""
    rows = [_row(model, share, entry) for model in result["models"] for share, entry in _steps(model)]
    lines = [line for model in result["models"] for line in _lines(model)]
    lines += [f"{one['preset']}: skipped, {one['reason']}" for one in result["skipped"]]
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    how = f"{result['precision']}, {'compiled' if result['compiled'] else 'eager'}, {result['elapsed_s']:.0f} s in all"
    return "\n".join([table(_HEAD, rows), "", *lines, "", f"{machine}, {how}", result["command"]])


def _steps(model: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from model["lengths"].items()
    yield "plain GPT-2", model["plain_gpt2"]


def _row(model: Mapping[str, Any], share: str, entry: Mapping[str, Any]) -> list[str]:
    step, memory, mfu = entry["step_ms"], entry["peak_memory_bytes"], entry["mfu"]
    is_ours = "flops_ratio" in entry
    return [
        model["preset"],
        share,
        f"{step['median']:.4g} ({step['min']:.4g}-{step['max']:.4g})",
        f"{(entry['time_ratio'] if is_ours else entry['over_ours'])['median']:.3f}",
        f"{entry['flops_ratio']:.3f}" if is_ours else "1.000",
        count(entry["tokens_per_s"]["median"]),
        "" if mfu is None else f"{mfu['median']:.1%}",
        "" if memory is None else f"{memory / 1e9:.1f} GB",
        f"{entry['gather_combine_share']['median']:.1%}" if is_ours else "",
        f"{entry['draw_share']['median']:.1%}" if is_ours else "",
        f"{grown['time_ratio']['median']:.3f} by {grown['micro_batch']}" if (grown := entry.get("grown")) else "",
    ]


def _lines(model: Mapping[str, Any]) -> Iterator[str]:
    """What the schedule saves and what a start takes."""
    schedule, start = model["schedule"], model["start_s"]
    first, last = schedule["kept_lengths"]
    yield (
        f"{model['preset']}: the paper's schedule, {first} to {last} tokens, saves"
        f" {_percent(schedule['realised_saving'])} of the time and {schedule['theoretical_saving']:.1%} of the FLOPs:"
        f" {_range(schedule['realised_over_theoretical'])}; of the plain GPT-2's time"
        f" {_percent(schedule['realised_saving_against_plain'])}"
    )
    grown = model["schedule_grown"]
    yield (
        f"  with micro batches that grow: {_percent(grown['realised_saving'])} of the time,"
        f" {_range(grown['realised_over_theoretical'])}; of the plain GPT-2's"
        f" {_percent(grown['realised_saving_against_plain'])}"
    )
    alone = model["full_length_alone_ms"]["median"]
    compiling = ", ".join(f"{case} {seconds:.1f}" for case, seconds in start["first_steps"].items())
    yield (
        f"  micro batch {model['micro_batch']}, {model['rounds']} rounds; full length before any other {alone:.4g} ms;"
        f" ready after {start['before_rounds']:.1f} s, first steps at {compiling} s"
    )
    if (save := model["checkpoint"]) is not None:
        yield (
            f"  training waits {save['blocked_s']:.3f} s for a checkpoint of {save['bytes'] / 1e9:.3g} GB, which is"
            f" committed after {save['committed_s']:.1f} s"
        )
    if model["host_waits"] is not None:
        yield f"  a step waits for the GPU: {model['host_waits']}"


def _range(figure: Mapping[str, float]) -> str:
    return f"{figure['median']:.2f} ({figure['min']:.2f}-{figure['max']:.2f})"


def _percent(figure: Mapping[str, float]) -> str:
    return f"{figure['median']:.1%} ({figure['min']:.1%} to {figure['max']:.1%})"


COMMAND = Command(
    "bench device",
    run,
    arguments,
    about="Time random-LTD on this device: models of several sizes by kept length, and the paper's whole schedule.",
    more="Needs torch alone, and a C compiler where layers are compiled.",
    example="tokendrop bench device --presets gpt-1m --minutes 2 --out device.json",
)
