"""One model of `tokendrop bench device`: what can be timed of it, and how often to, within the time that it has."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import ceil

import torch
from torch import Tensor

from tokendrop.bench.device_save import Save, save_twice
from tokendrop.bench.figures import interleave
from tokendrop.bench.reference import Plain, plain_model
from tokendrop.bench.step import plain_step, synchronize, timed, timed_step
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.method import Dropping
from tokendrop.method.tokens import Stream, combine_tokens, gather_tokens
from tokendrop.models.batch import Batch
from tokendrop.train.engines.base import Engine
from tokendrop.train.optimizer import build_optimizers
from tokendrop.train.worker import build_engine

# Dimensions: B micro batch, S sequence, K kept length, D width.

SHARES = {"1/16": (1, 16), "1/8": (1, 8), "1/4": (1, 4), "1/2": (1, 2), "3/4": (3, 4), "1/1": (1, 1)}
"""The kept lengths that are timed, as shares of the sequence."""
FULL, UPDATE, PLAIN = "1/1", "update", "plain"
FEWEST_ROUNDS = 3
_AT_LEAST_S, _MOST_RUNS = 0.1, 20  # of one measurement on a GPU, which runs a step several times for that
_WARM_UPS = 2  # after the first step, which compiles


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """What is seen of a model before the rounds."""

    alone_s: list[float]
    """Of a step at full length, before any length was dropped to: compiled for that length alone."""
    first_s: dict[str, float]
    """Of the first step at each length, and of the plain model's: it compiles."""
    peak_bytes: dict[str, int | None]
    """Of the device's memory, by length and of the plain model; None on a CPU."""
    host_waits: str | None
    """What a step waited for the GPU for; None where it did not."""
    save: Save | None
    """None where there was no room for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one model, all times in seconds."""

    first: FirstSteps
    seconds: dict[str, list[float]]
    """By case, one a round: a step at each of `SHARES`, `grown SHARE` with a micro batch that has grown for it, `draw
    SHARE` and `move SHARE`, `UPDATE` and `PLAIN`."""
    rounds: int
    build_s: float
    setup_s: float
    """Of all before the rounds."""
    round_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A job's model on its device, with what it trains on."""

    config: ExperimentConfig
    engine: Engine
    dropping: Dropping
    batch: Batch
    grown: Mapping[str, Batch]
    """By share, where more sequences run at a time than at full length."""

    @property
    def lengths(self) -> dict[str, int]:
        """Kept lengths by share."""
        return kept_lengths(self.config.model.sequence_length)

    @property
    def steps(self) -> dict[str, Callable[..., float]]:
        """Seconds of a whole training step, by its case; told how often in a row it is to run."""
        steps = {share: partial(self.step_s, kept) for share, kept in self.lengths.items()}
        grown = {
            f"grown {share}": partial(self.step_s, self.lengths[share], batch=b) for share, b in self.grown.items()
        }
        return {**steps, **grown}

    def step_s(self, kept_length: int, *, runs: int = 1, batch: Batch | None = None) -> float:
        """Seconds of a whole training step."""
        return timed_step(
            self.engine,
            self.dropping,
            self.batch if batch is None else batch,
            kept_length=kept_length,
            sequence_length=self.config.model.sequence_length,
            runs=runs,
        )

    def draw(self, kept_length: int) -> None:
        """Choose tokens as a step does."""
        self.dropping.draw(
            kept_length=kept_length,
            step=0,
            sample_ids=self.batch.sample_ids_B,
            sequence_length=self.config.model.sequence_length,
            device=self.batch.device,
        )

    def mover(self, kept_length: int) -> Callable[[], None]:
        """What gathers and combines as the dropped layers of a step do, there and back, with no layer in between."""
        self.draw(kept_length)
        kept = [one for layer in self.dropping.layers if isinstance(one := self.dropping.kept(layer), Tensor)]
        shape = len(self.batch.sample_ids_B), self.config.model.sequence_length, self.config.model.shape.width
        hidden_BSD, grad_BSD = (torch.randn(shape, device=self.batch.device) for _ in range(2))

        def move() -> None:
            out_BSD = hidden_BSD.detach().requires_grad_()
            stream = None if self.config.train.compile else Stream()  # a compiled layer copies, in its graph
            for kept_BK in kept:
                kept_BKD, rest_BSD = gather_tokens(out_BSD, kept_BK, stream)
                out_BSD = combine_tokens(rest_BSD, kept_BKD, kept_BK, stream)
            out_BSD.backward(grad_BSD)

        return move

    def update_s(self) -> float:
        """Seconds of clip and AdamW alone."""
        self.draw(next(iter(self.lengths.values())))
        self.engine.forward_backward(self.batch, share=1, last_micro_batch=True)
        return timed(partial(self.engine.step, lr=1e-4, max_grad_norm=1.0), self.batch)

    def plain(self) -> Callable[[], None]:
        """What runs a step of a plain model of the same sizes, compiled as a whole where our layers are compiled."""
        model = plain_model(self.config.model, self.engine.model)
        assert isinstance(model, Plain)
        (optimizer,) = build_optimizers(model.model.to(self.batch.device), self.config.train)
        if self.config.train.compile:
            model.model.compile()
        return partial(plain_step, model, optimizer, self.batch, self.engine.dtype)


def kept_lengths(sequence_length: int) -> dict[str, int]:
    """Those that are timed, by their share."""
    return {share: sequence_length * above // below for share, (above, below) in SHARES.items()}


def grown_micro_batch(config: ExperimentConfig, kept_length: int) -> int:
    """Sequences that a job of one worker, whose micro batches may grow, runs at a time at a kept length."""
    shape, batch, dropped = config.model.shape, config.plan.batch, len(config.plan.dropped_layers)
    work = [(dropped, batch.global_batch, kept_length)]
    work += [(shape.layers - dropped, batch.global_batch, shape.sequence_length)]
    growth = config.train.growth(dropout=config.model.dropout)
    return batch.merged(growth.most_sequences(batch, shape, work=work, kept=kept_length)).micro_batch


def measure_model(
    config: ExperimentConfig, device: torch.device, *, rounds: int, share_s: float, log: Callable[[str], None]
) -> Measured:
    """Time a job's model in interleaved rounds, as many as fit into `share_s`, its setup included.

    Args:
        rounds: at most; `FEWEST_ROUNDS` are run in any case.
    """
    started = time.perf_counter()
    engine, dropping = build_engine(config, device)
    assert dropping is not None
    task, lengths = config.task.build(config), kept_lengths(config.model.sequence_length)
    batch = task.random_batch(config.train.micro_batch, device)
    sizes = {share: grown_micro_batch(config, kept) for share, kept in lengths.items()}
    grown = {share: task.random_batch(size, device) for share, size in sizes.items() if size > config.train.micro_batch}
    synchronize(batch)
    build_s = time.perf_counter() - started
    subject = Subject(config=config, engine=engine, dropping=dropping, batch=batch, grown=grown)
    first, plain = _first_steps(subject)
    cases = _cases(subject, plain)
    setup_s, begun = time.perf_counter() - started, time.perf_counter()
    for case in cases.values():
        case()
    round_s = time.perf_counter() - begun
    rounds = max(FEWEST_ROUNDS, min(rounds, int((share_s - setup_s) / round_s) - 1))
    done = count(1)
    seconds = interleave(cases, rounds=rounds, log=lambda _: log(f"round    {next(done)}/{rounds} of {config.name}"))
    return Measured(first=first, seconds=seconds, rounds=rounds, build_s=build_s, setup_s=setup_s, round_s=round_s)


def _first_steps(subject: Subject) -> tuple[FirstSteps, Callable[[], None]]:
    """Compile all that is timed; with it, what runs a step of the plain model, which is not there until then."""
    device, lengths = subject.batch.device, subject.lengths
    first_s = {FULL: subject.step_s(lengths[FULL])}
    alone_s = [subject.step_s(lengths[FULL]) for _ in range(_WARM_UPS + FEWEST_ROUNDS)][_WARM_UPS:]
    first_s |= {case: step() for case, step in subject.steps.items() if case != FULL}
    peak_bytes = {case: peak_memory(step, device) for case, step in subject.steps.items()}
    host_waits, save = what_the_host_waits_for(subject), save_twice(subject.engine)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    plain = subject.plain()
    first_s[PLAIN] = timed(plain, subject.batch)
    most = peak_memory(plain, device)
    peak_bytes[PLAIN] = None if most is None else most - held
    first = FirstSteps(alone_s=alone_s, first_s=first_s, peak_bytes=peak_bytes, host_waits=host_waits, save=save)
    return first, plain


def _cases(subject: Subject, plain: Callable[[], None]) -> dict[str, Callable[[], float]]:
    """All that is timed, each run so often in a row that a measurement is long against a GPU's start of it."""
    batch = subject.batch
    cases: dict[str, Callable[[], float]] = {}
    for case, step in subject.steps.items():
        cases[case] = partial(step, runs=_runs(min(step() for _ in range(_WARM_UPS)), batch))
    for share, kept in subject.lengths.items():
        if share != FULL:
            cases[f"draw {share}"] = partial(timed, partial(subject.draw, kept), batch, runs=5)
            cases[f"move {share}"] = partial(timed, subject.mover(kept), batch, runs=5)
    cases[UPDATE] = subject.update_s
    runs = _runs(min(timed(plain, batch) for _ in range(_WARM_UPS)), batch)
    cases[PLAIN] = partial(timed, plain, batch, runs=runs)
    return cases


def _runs(seconds: float, batch: Batch) -> int:
    if batch.device.type != "cuda":
        return 1
    return max(1, min(_MOST_RUNS, ceil(_AT_LEAST_S / seconds)))


def peak_memory(run: Callable[[], object], device: torch.device) -> int | None:
    """The most bytes of tensors that the device held during a run; None on a CPU, where nothing runs for that."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def what_the_host_waits_for(subject: Subject) -> str | None:
    """What torch says of the first wait for the GPU in steps at all lengths; None where there is no wait.

    The steps are those that report nothing: no loss is read.
    """
    if subject.batch.device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in subject.steps.values():
            step(runs=2)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        subject.engine.zero_grad()
    return None


def expected_s(before: Measured, *, layers: float, parameters: float, work: float) -> float:
    """What a model takes at least, by what another one took.

    Args:
        layers: how many times as many, for which the compiler takes time.
        parameters: how many times as many, of which checkpoints are saved.
        work: how many times the FLOPs of a step.
    """
    saves_s = 0.0 if before.first.save is None else before.first.save.took_s
    setup_s = (before.setup_s - saves_s) * max(1.0, layers) + saves_s * max(1.0, parameters)
    return setup_s + (FEWEST_ROUNDS + 1) * before.round_s * work
