"""Run folders as training writes them, of which the steps alone are made up."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny import experiment
from tokendrop.track.journal import Journal
from tokendrop.track.run_folder import describe_run
from tokendrop.train.report import StepReport


def loss_of(step: int, seed: int) -> float:
    return 2 + 4 / (1 + step) + seed / 100


def record(
    run: Path,
    *,
    steps: int = 12,
    first: int = 0,
    last: int | None = None,
    seed: int = 1,
    world_size: int = 1,
    validate_every: int = 4,
    committed: bool = True,
    loss: Callable[[int, int], float] = loss_of,
    pause_s: float = 0.0,
    **changes: Any,
) -> Path:
    """Describe a run and record its steps, first < step <= last, with losses of (step, seed), and pauses between."""
    config = replace(experiment(train__length=f"{steps} steps", **changes), seed=seed)
    plan, last = config.plan, steps if last is None else last
    data = run.parent.parent / "shards"
    data.mkdir(parents=True, exist_ok=True)
    (data / "tokenizer.json").write_text("{}")
    run.mkdir(parents=True, exist_ok=True)
    describe_run(run, config, data)
    journal = Journal(run, rank=0, world_size=world_size, start=first)
    for step in range(first + 1, last + 1):
        value = loss(step, seed)
        report = StepReport(
            step=step,
            loss=value,
            val_loss=value if step % validate_every == 0 or step == steps else None,
            grad_norm=1.0,
            lr=plan.lr(step - 1),
            kept_length=plan.at(step - 1).kept_length,
            tokens=step * plan.tokens_per_step,
            layer_tokens=plan.layer_tokens(step),
            flops=float(plan.flops(step)),
            world_size=world_size,
            data_time_s=0.01,
            step_time_s=0.1 * (1 + seed / 10) * (1 + math.sin(step) / 4),
        )
        journal.record(report, [step])
        time.sleep(pause_s)
    if committed:
        journal.commit(last)
    else:  # as the driver stops it; its steps are in the live record alone
        journal.pause(last, checkpoint_s=0.5)
    return run
