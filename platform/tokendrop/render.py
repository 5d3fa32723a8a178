"""Results as text: tables for people, JSON for scripts."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any, TextIO

from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.plan import RunPlan
from tokendrop.schedule.scaling import Estimate, estimate
from tokendrop.secrets import redact, redact_all

_MOST_ROWS, _MOST_RESIZES = 16, 8
_results: ContextVar[TextIO | None] = ContextVar("results", default=None)


@contextmanager
def results_alone() -> Iterator[None]:
    """Keep standard output for what this module prints; what libraries print there goes to standard error.

    Ray prints warnings of the whole cluster on a driver's standard output, whatever `log_to_driver` says.
    """
    token = _results.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results.reset(token)


def results() -> TextIO:
    """The stream that results go to."""
    return _results.get() or sys.stdout


def print_json(result: Mapping[str, Any], *, is_corpus: bool = False) -> None:
    """One JSON object on standard output.

    Args:
        is_corpus: whether it holds text of a corpus, which is shown as it is.
    """
    print(json.dumps(result if is_corpus else redact_all(result), indent=1), file=results())


def print_text(text: str, *, is_corpus: bool = False) -> None:
    """A result on standard output."""
    print(text if is_corpus else redact(text), file=results())


def say(text: str) -> None:
    """A line on standard error, beside the results on standard output."""
    print(redact(text), file=sys.stderr, flush=True)


class StatusLine:
    """Long work's state on standard error: one line rewritten on a terminal, a line now and then elsewhere."""

    def __init__(self, *, at_once: bool = True) -> None:
        """
        Args:
            at_once: whether the first state is shown; else only work that takes a while is spoken of.
        """
        self.is_terminal = sys.stderr.isatty()
        self._every_s = 0.1 if self.is_terminal else 10.0
        self._shown: float | None = None
        self._due = 0.0 if at_once else time.monotonic() + self._every_s

    def show(self, text: Callable[[], str], *, always: bool = False) -> None:
        """Show what `text` returns, when the line is due or `always`."""
        now = time.monotonic()
        if always or now >= self._due:
            self._shown, self._due = now, now + self._every_s
            shown = redact(text())
            sys.stderr.write(f"\r\x1b[K{shown}" if self.is_terminal else f"{shown}\n")
            sys.stderr.flush()

    def end(self) -> None:
        """Leave the line as it is; what is written next begins a new one."""
        if self.is_terminal and self._shown is not None:
            sys.stderr.write("\n")
        self._shown = None


@contextmanager
def progress_line(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """How far work that takes a while has come: what this gives takes the units done and those there are."""
    line = StatusLine(at_once=False)
    try:
        yield lambda done, size: line.show(lambda: f"{what}  {done / max(1, size):.0%} of {count(size)} {unit}")
    finally:
        line.end()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their text; the first one to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def count(number: float) -> str:
    """1234567 as 1.23M."""
    units = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    for size, unit in units:
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def plan_result(plan: RunPlan, *, fixed: RunPlan | None = None, profile: DeviceProfile | None = None) -> dict[str, Any]:
    """A plan as scripts read it.

    Args:
        fixed: the same run at a fixed number of workers, and
        profile: its devices; with both, what each run takes.
    """
    return {
        "steps": plan.steps,
        "tokens": plan.steps * plan.tokens_per_step,
        "layer_tokens": plan.layer_tokens(plan.steps),
        "layer_tokens_full": plan.layer_tokens_full,
        "layer_token_saving": plan.layer_token_saving(),
        "dropped_layer_token_saving": plan.dropped_layer_token_saving(),
        "flops": plan.flops(plan.steps),
        "flops_full": plan.flops_full,
        "flops_saving": plan.flops_saving(),
        "lr_clock": plan.lr_clock,
        "lr_warmup": plan.learning_rate.warmup,
        "lr_decay": plan.learning_rate.decay_length,
        "lr_warmup_steps": plan.warmup_steps(),
        "global_batch": plan.batch.global_batch,
        "micro_batch": plan.batch.micro_batch,
        "segments": [
            {
                "start": segment.start,
                "stop": segment.stop,
                "kept_length": segment.kept_length,
                "workers": segment.workers,
                "accumulation": segment.accumulation,
            }
            for segment in plan.segments
        ],
        "resizes": [{"step": step, "from": before, "to": after} for step, before, after in plan.resizes],
        **({} if fixed is None or profile is None else _bill(plan, fixed, profile)),
    }


def _bill(plan: RunPlan, fixed: RunPlan, profile: DeviceProfile) -> dict[str, Any]:
    both = {"": estimate(plan, profile), "_fixed": estimate(fixed, profile)}
    figures = {f"{key}{of}": value for of, one in both.items() for key, value in asdict(one).items()}
    return {"profile": profile.name, "profile_kind": profile.kind, **figures}


def plan_text(name: str, plan: RunPlan, *, fixed: RunPlan, profile: DeviceProfile | None = None) -> str:
    """A plan as people read it; arguments as of `plan_result`."""
    rows = _segment_rows(plan)
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows = [*rows[:half], [f"... {len(rows) - 2 * half} more", "", "", "", "", ""], *rows[-half:]]
    header = ["steps", "kept length", "workers", "accumulation", "lr at the end", "saved by then"]
    facts = [*_facts(name, plan), *_scaling_facts(plan, fixed, profile)]
    return "\n".join(f"{key:<14} {value}" for key, value in facts) + "\n\n" + table(header, rows)


def _scaling_facts(plan: RunPlan, fixed: RunPlan, profile: DeviceProfile | None) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if plan.resizes:
        some = [f"{after} from step {step:,}" for step, _, after in plan.resizes[:_MOST_RESIZES]]
        more = len(plan.resizes) - len(some)
        facts = [("workers", ", ".join([f"{plan.at(0).workers}", *some, *([f"{more} more"] if more else [])]))]
    if profile is None:
        return facts
    now, then = estimate(plan, profile), estimate(fixed, profile)
    facts += [("expected", f"{_taken(now)}   by {profile.name} ({profile.kind})")]
    if plan != fixed:
        facts += [("fixed size", f"{_taken(then)}   on {fixed.at(0).workers} workers")]
    return facts


def _taken(estimate: Estimate) -> str:
    hours = estimate.wall_clock_s / 3600
    time = f"{estimate.wall_clock_s:.0f} s" if hours < 1 else f"{hours:.1f} h"
    cost = "" if estimate.cost is None else f", ${estimate.cost:,.2f}"
    return f"{time}, {estimate.gpu_hours:,.2f} GPU-hours{cost}"


def _facts(name: str, plan: RunPlan) -> list[tuple[str, str]]:
    shape, batch, rate = plan.shape, plan.batch, plan.learning_rate
    unit = "steps" if plan.lr_clock == "step" else "layer tokens"
    return [
        (
            "run",
            f"{name}: {plan.steps:,} steps of {batch.global_batch} x {shape.sequence_length} tokens,"
            f" {count(plan.steps * plan.tokens_per_step)} tokens",
        ),
        ("layers", f"{shape.layers}, of which {len(plan.dropped_layers)} drop tokens"),
        (
            "layer tokens",
            f"{count(plan.layer_tokens(plan.steps))} of {count(plan.layer_tokens_full)}:"
            f" {plan.layer_token_saving():.2%} saved over all layers,"
            f" {plan.dropped_layer_token_saving():.2%} over the dropped ones",
        ),
        (
            "FLOPs",
            f"{count(plan.flops(plan.steps))} of {count(plan.flops_full)}: {plan.flops_saving():.2%} saved",
        ),
        (
            "learning rate",
            f"{rate.peak:g} -> {rate.final:g}, {rate.decay}; warm-up {count(rate.warmup)} {unit}"
            f" ({plan.warmup_steps():,} steps), decay {count(rate.decay_length)} {unit}",
        ),
    ]


def _segment_rows(plan: RunPlan) -> list[list[str]]:
    return [
        [
            f"{s.start:,}-{s.stop:,}",
            f"{s.kept_length}",
            f"{s.workers}",
            f"{s.accumulation}",
            f"{plan.lr(s.stop - 1):.3g}",
            f"{1 - plan.layer_tokens(s.stop) / (plan.layer_tokens_full * s.stop / plan.steps):.1%}",
        ]
        for s in plan.segments
    ]


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


def bench_text(result: Mapping[str, Any]) -> str:
    """Figures of a benchmark, with their spread."""
    rows = [
        [name, f"{figure['median']:.4g}", f"{figure['min']:.4g}", f"{figure['max']:.4g}", figure["unit"]]
        for name, figure in result["figures"].items()
    ]
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    return f"{table(['figure', 'median', 'min', 'max', 'unit'], rows)}\n\n{machine}\n{result['command']}"


def cluster_text(status: Mapping[str, Any]) -> str:
    """A local cluster: its nodes, what they have in use, what is asked of it."""

    def share(of: Mapping[str, Any]) -> list[str]:
        return [f"{of['used'].get(name, 0):g}/{of['resources'].get(name, 0):g}" for name in ("CPU", "GPU")]

    rows = [[node["role"], node["state"], *share(node)] for node in status["nodes"]]
    rows += [["worker", "pending", "", ""]] * status["pending"]
    rows.append(["all", "", *share(status)])
    requested = [
        f"{request['count']} x {', '.join(f'{amount:g} {name}' for name, amount in request['resources'].items())}"
        for request in status["requested"]
    ]
    return "\n".join(
        [
            table(["node", "state", "CPUs used", "GPUs used"], rows),
            "",
            f"requested  {'; '.join(requested) or 'nothing more'}",
            addresses_text(status["dashboard"], status["environment"]),
        ]
    )


def addresses_text(dashboard: str, environment: Mapping[str, str]) -> str:
    """How to reach a local cluster."""
    return f"dashboard  {dashboard}\nexport {' '.join(f'{name}={value}' for name, value in environment.items())}"
