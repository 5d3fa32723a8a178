"""The training loop: the same for one worker and for many."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.method import Dropping, TokenScores
from tokendrop.models.batch import Batch
from tokendrop.models.layer import recompute_layers
from tokendrop.schedule.plan import RunPlan
from tokendrop.train.adaptive import Decisions, kept_by_schedule
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.dropping import draw, dropping_in_evaluation
from tokendrop.train.engines.base import Engine
from tokendrop.train.figures import HostCopy, StartedStep
from tokendrop.train.held_out import held_out_mean, labels_per_sample
from tokendrop.train.report import Recorder, StepReport
from tokendrop.train.trace import Trace, untraced


class Batches(Protocol):
    """Where a worker's micro batches come from."""

    def of_step(self, step: int) -> Iterator[Batch]:
        """This worker's micro batches of one step, by arithmetic from the step alone."""
        ...

    def validation(self) -> Sequence[tuple[Batch, int]]:
        """This worker's share of the held-out rows, and how many rows of each batch count.

        There are as many batches on every worker, and at least one.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainComponents:
    """Everything that one worker trains with."""

    engine: Engine
    dropping: Dropping | None
    batches: Batches
    checkpoints: Checkpoints
    recorder: Recorder
    world_size: int
    decisions: Decisions | None = None
    """What is decided as the run goes, where the job has such schedules."""
    scores: TokenScores | None = None
    """Running losses of tokens, where the job's method chooses by them; its checkpoints hold them too."""
    pause: Callable[[int], bool] = lambda step: False
    """Told the steps done; whether this worker is asked to pause, for all of them: after the next step, or, as
    the answers of all are read with that step's figures, `reads_behind` steps later."""
    trace: Trace = untraced
    """Around the work of a step, numbered from 1, where the job wants some of them traced."""
    reads_behind: int = 0
    """Steps that the device is given before the host waits for the figures of an earlier one: 1 keeps a GPU busy."""

    def plan(self, config: ExperimentConfig) -> RunPlan:
        """A job's plan as it is decided by now."""
        return config.plan if self.decisions is None else self.decisions.config.plan


def train(config: ExperimentConfig, components: TrainComponents, *, start: int, stop: int | None = None) -> int:
    """Train from step `start` to `stop`, to where the workers change when left out; every worker runs this loop.

    Returns:
        The step reached, earlier than `stop` where the workers were asked to pause; its checkpoint is committed.
    """
    plan, decisions = components.plan(config), components.decisions
    end = plan.next_resize(start) if stop is None else stop
    validate_every, save_every = config.in_steps(config.evaluate.every), config.in_steps(config.checkpoint.every)

    components.engine.model.train()
    started: deque[StartedStep] = deque()
    clock, done, pause_requested = time.perf_counter(), start, False
    while done < end and not pause_requested:
        with components.trace(done + 1):
            started.append(start_step(config, plan, components, done))
        done += 1
        validates = done % validate_every == 0 or done == plan.steps
        decides = decisions is not None and decisions.are_due(done)
        waits = validates or decides or done % save_every == 0 or done == end
        while started and (waits or pause_requested or len(started) > components.reads_behind):
            step = started.popleft()
            report, pauses = step.read()
            check_finite(report)
            report = replace(report, step_time_s=time.perf_counter() - clock)
            pause_requested = pause_requested or pauses
            if validates and report.step == done:
                val_loss, figures = validate(components)
                report = replace(report, val_loss=val_loss, val_figures=figures)
            clock = time.perf_counter()
            components.recorder.record(report, step.sample_ids)
        if decisions is not None and decides:
            plan, before = decide(components, decisions, done), plan
            if stop is None:
                end = done if plan.at(done).workers != before.at(done - 1).workers else plan.next_resize(done)
            clock = time.perf_counter()
        if done % save_every == 0 or done == end or pause_requested:
            components.recorder.commit(done)
            components.checkpoints.save(components.engine, done)
    components.checkpoints.wait()
    if done < plan.steps:
        components.recorder.pause(done, checkpoint_s=time.perf_counter() - clock)
    return done


def check_finite(report: StepReport) -> None:
    """Raises UserError where training has diverged, on all workers at once; nothing of the step is saved."""
    if not math.isfinite(report.loss) or not math.isfinite(report.grad_norm):
        raise UserError(
            f"training has diverged: at step {report.step} the loss is {report.loss:g}, the gradient norm"
            f" {report.grad_norm:g}; want a lower train.peak_lr, a longer train.warmup or a smaller"
            " train.max_grad_norm; 'tokendrop fork' begins with one of the run's checkpoints"
        )


def decide(components: TrainComponents, decisions: Decisions, step: int) -> RunPlan:
    """Decide the kept lengths that are due once `step` steps are done; the plan from there on."""
    dropping, batch_split = components.dropping, replace(decisions.config.plan.batch, world_size=components.world_size)
    assert dropping is not None

    def probe(config: ExperimentConfig, step: int, key: str) -> float:
        batches = config.drop.adaptive[key].probe_batches * batch_split.accumulation
        rows = components.batches.validation()[:batches]
        kept = kept_by_schedule(config, key, step - 1)
        whole, _ = held_out_mean(components.engine, rows)

        def choose(batch: Batch) -> None:
            draw(config, config.plan, dropping, batch, step=step, kept=kept, scores=components.scores)

        with dropping_in_evaluation(dropping):
            dropped, _ = held_out_mean(components.engine, rows, before=choose)
        return dropped - whole

    decisions.decide(step, probe)
    return decisions.config.plan


def start_step(config: ExperimentConfig, plan: RunPlan, components: TrainComponents, step: int) -> StartedStep:
    """Give the device one optimizer step, without waiting for it."""
    loss, sample_ids, data_time = accumulate(config, plan, components, step)
    lr = plan.lr(step)
    grad_norm = components.engine.step(lr=lr, max_grad_norm=config.train.max_grad_norm)
    if components.scores is not None:
        components.scores.end_step(components.engine.add_up)
    # one reduction for both: asking costs no round of its own
    mean_loss, pauses = components.engine.mean(
        torch.stack([loss, torch.full_like(loss, components.pause(step))])
    ).unbind()
    done = step + 1
    report = StepReport(
        step=done,
        loss=math.nan,
        val_loss=None,
        grad_norm=math.nan,
        lr=lr,
        kept_length=plan.at(step).kept_length,
        tokens=done * plan.tokens_per_step,
        layer_tokens=plan.layer_tokens(done),
        flops=float(plan.flops(done)),
        world_size=components.world_size,
        data_time_s=data_time,
        step_time_s=0.0,
    )
    return StartedStep(report=report, sample_ids=sample_ids, figures=HostCopy(mean_loss, pauses, grad_norm))


def accumulate(
    config: ExperimentConfig, plan: RunPlan, components: TrainComponents, step: int
) -> tuple[Tensor, list[int], float]:
    """Add up the gradients of one step, micro batch by micro batch.

    Returns:
        This worker's mean loss, the samples that it trained on, and the seconds that it waited for them.
    Raises:
        UserError: the method goes by the loss of each token, which the task does not give.
    """
    losses: list[Tensor] = []
    sample_ids: list[int] = []
    data_time = 0.0
    segment = plan.at(step)
    split = plan.split(segment, components.world_size)
    recompute_layers(components.engine.model, again=segment.recomputes)
    for batch, waited in micro_batches(config, components, step, segment.kept_length, size=split.micro_batch):
        if (dropping := components.dropping) is not None:
            draw(config, plan, dropping, batch, step=step, kept=segment.kept_by_route, scores=components.scores)
        if config.model.dropout:
            torch.manual_seed(hash((config.seed, step, *batch.numbers)))
        last = len(losses) + 1 == split.accumulation
        loss = components.engine.forward_backward(batch, share=1 / split.accumulation, last_micro_batch=last)
        if components.scores is not None:
            if loss.token_losses_BS is None:
                raise UserError(f"drop.method: '{config.drop.method}' wants a task that gives the loss of each token")
            components.scores.add(batch.inputs()["labels_BS"], loss.token_losses_BS)
        losses.append(loss.mean)
        sample_ids += batch.sample_ids_B.tolist()
        data_time += waited
    return torch.stack(losses).mean(), sample_ids, data_time


def micro_batches(
    config: ExperimentConfig, components: TrainComponents, step: int, kept_length: int, *, size: int
) -> Iterator[tuple[Batch, float]]:
    """This worker's micro batches of a step as the model reads them, each with the seconds that it was waited for.

    They are joined to batches of `size` samples.

    Where their numbers of labels differ, all of them are made before the first one is trained on, so that the mean of
    their losses is that over all labels of the global batch.
    """
    batches = timed(components.batches.of_step(step), components.engine.label)
    if size > config.train.micro_batch:
        batches = joined(batches, size // config.train.micro_batch)
    if config.drop.cuts:
        batches = ((config.drop.shortened(batch, kept_length), waited) for batch, waited in batches)
    first, waited = next(batches)
    if first.labels() is None:
        yield first, waited
        yield from batches
        return
    everything = [(first, waited), *batches]
    mean = labels_per_sample(components.engine, [(batch, len(batch.sample_ids_B)) for batch, _ in everything])
    yield from ((batch.weighed(mean), waited) for batch, waited in everything)


def joined(batches: Iterator[tuple[Batch, float]], together: int) -> Iterator[tuple[Batch, float]]:
    """So many batches as one each."""
    while some := list(islice(batches, together)):
        yield Batch.joined([batch for batch, _ in some]), sum(waited for _, waited in some)


def validate(components: TrainComponents) -> tuple[float, dict[str, float]]:
    """Mean loss over the held-out rows, no token dropped, and the task's figures."""
    return held_out_mean(components.engine, components.batches.validation())


def timed(
    batches: Iterator[Batch], label: Callable[[str], AbstractContextManager[Any]]
) -> Iterator[tuple[Batch, float]]:
    """Each batch, with the seconds that it was waited for."""
    while True:
        began = time.perf_counter()
        with label("data"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - began
