"""The root of a run's configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from math import ceil

from tokendrop.config.data import DataConfig, PairsConfig
from tokendrop.config.drop import Clock, DropConfig, NoDropping, dropped_layers
from tokendrop.config.files import not_a_folder
from tokendrop.config.model import BertConfig, GptConfig
from tokendrop.config.run import CheckpointConfig, EvaluateConfig, ScalingConfig, TrackConfig
from tokendrop.config.train import TrainConfig
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.duration import Duration
from tokendrop.schedule.plan import RunPlan, build_plan, check_countable
from tokendrop.secrets import redact

_LONGEST_NAME = 200  # bytes; a run folder has a date behind it, and file systems take 255


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExperimentConfig:
    """One run, whole; rules over two branches are checked here."""

    name: str
    seed: int = 1234
    runs_folder: str = "runs"
    """Run folders are made below this one; a path that all workers share."""
    run: str | None = None
    """The run's folder below that: begun once, and gone on with by each later start of the job; null for a new one."""
    model: GptConfig | BertConfig
    data: DataConfig
    train: TrainConfig
    drop: DropConfig = field(default_factory=NoDropping)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        for key, name in (("name", self.name), ("run", "unnamed" if self.run is None else self.run)):
            if not name.strip(".") or not all(letter.isalnum() or letter in "-_." for letter in name):
                raise ValueError(f"{key}: want letters, digits, '-', '_' and '.', not dots alone, got {name!r}")
            if len(name.encode()) > _LONGEST_NAME:
                raise ValueError(f"{key}: want at most {_LONGEST_NAME} bytes, got {len(name.encode())}")
        if reason := not_a_folder(self.runs_folder):
            raise ValueError(f"runs_folder: {reason}")
        if self.model.reads != "sentence_pairs" and self.data.pairs != PairsConfig():
            raise ValueError(f"data.pairs: only a model of kind bert reads pairs of sentences, not '{self.model.kind}'")
        self.plan()

    def __repr__(self) -> str:
        """Without secrets: Ray shows it to everybody in its dashboard."""
        return redact(
            f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self))})"
        )

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.model.sequence_length

    @property
    def steps(self) -> int:
        """Optimizer steps of the run; a length in tokens is rounded up to whole steps."""
        return ceil(self.train.length.steps(tokens_per_step=self.tokens_per_step))

    def in_steps(self, duration: Duration) -> int:
        """A duration as whole steps, at least 1."""
        steps = duration.steps(tokens_per_step=self.tokens_per_step, total_steps=self.steps)
        return max(1, round(steps))

    def plan(self) -> RunPlan:
        """The whole run, step by step.

        Raises:
            ValueError: two branches do not fit together; the message names the keys.
        """
        fixed = self.plan_fixed()
        with _naming("scaling"):
            return self.scaling.apply(fixed)

    def plan_fixed(self) -> RunPlan:
        """The same run on `scaling.workers` at every step."""
        train, shape = self.train, replace(self.model.shape, head_drops=self.drop.cuts)
        with _naming("train.global_batch"):
            batch = BatchSplit(
                global_batch=train.global_batch,
                micro_batch=train.micro_batch,
                world_size=self.scaling.workers,
            )
        clock = Clock(
            sequence_length=shape.sequence_length,
            tokens_per_step=self.tokens_per_step,
            total_steps=self.steps,
        )
        with _naming("drop.schedule"):
            schedule = self.drop.schedule.build(clock)
            check_countable(schedule, self.steps)
            longest = schedule.kept_length(self.steps)
            if longest > shape.sequence_length:
                raise ValueError(f"a kept length of {longest} is over model.sequence_length={shape.sequence_length}")
        dropped = dropped_layers(self.drop.spans(shape.layers))
        warmup = train.warmup.steps(tokens_per_step=self.tokens_per_step, total_steps=self.steps)
        with _naming("train.warmup"):
            return build_plan(
                steps=self.steps,
                schedule=schedule,
                shape=shape,
                dropped_layers=dropped,
                batch=batch,
                lr_clock=train.lr_clock,
                warmup_steps=round(warmup),
                peak_lr=train.peak_lr,
                final_lr=train.final_lr,
                decay=train.decay,
                sharing=train.sharing,
            )


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Put the key that is wrong in front of what arithmetic says of its value."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
