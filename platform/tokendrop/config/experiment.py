"""The root of a run's configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import ceil

from tokendrop.config.data import SPECIAL_TOKENS, DataConfig, PairsConfig
from tokendrop.config.drop import DropConfig, NoDropping
from tokendrop.config.files import not_a_runs_folder
from tokendrop.config.fp8 import check_fp8
from tokendrop.config.layers import naming
from tokendrop.config.model import ModelConfig
from tokendrop.config.run import CheckpointConfig, EvaluateConfig, ScalingConfig, TrackConfig
from tokendrop.config.task import AnyTask, CausalLm
from tokendrop.config.train import TrainConfig
from tokendrop.errors import UserError
from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.duration import Clock, Duration, durations
from tokendrop.schedule.plan import RunPlan, build_plan
from tokendrop.schedule.routes import check_countable
from tokendrop.schedule.shapes import MOST_STATIC, layer_shapes
from tokendrop.secrets import redact

_LONG_EPOCH = 2**30  # steps
_LONGEST_NAME = 200  # bytes; a run folder has a date behind it, and file systems take 255


@dataclass(frozen=True, kw_only=True, repr=False)  # no slots: it keeps its plan
class ExperimentConfig:
    """One run, whole; rules over two branches are checked here."""

    name: str
    seed: int = 1234
    runs_folder: str = "runs"
    """Run folders are made below this one: a path that all workers share, or s3://BUCKET/PREFIX or gs://BUCKET/PREFIX."""
    run: str | None = None
    """The run's folder below that: begun once, and gone on with by each later start of the job; null for a new one."""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    task: AnyTask = field(default_factory=CausalLm)
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
        if reason := not_a_runs_folder(self.runs_folder):
            raise ValueError(f"runs_folder: {reason}")
        if self.task.reads == "images" and (self.data.reader != "memory_map" or self.data.tokenizer):
            key = "tokenizer" if self.data.tokenizer else "reader"
            raise ValueError(f"data.{key}: images are read from the shards' folder, without a tokenizer; leave it out")
        if self.task.reads == "images" and any(source.only for source in self.data.mixture):
            raise ValueError("data.only: images name no subset; leave it out")
        if self.task.reads != "sentence_pairs" and self.data.pairs != PairsConfig():
            raise ValueError(
                f"data.pairs: only a task of kind masked_lm reads pairs of sentences, not '{self.task.kind}'"
            )
        if self.drop.wants_causal and not self.model.shape.causal:
            raise ValueError(
                f"drop.method: '{self.drop.method}' wants a causal model, of kind gpt, not '{self.model.kind}'"
            )
        if self.track.register is not None and self.drop.learns:
            raise ValueError(
                f"track.register: drop.method '{self.drop.method}' has a router, which no format of others has; leave"
                " it out"
            )
        self.drop.check(self.model.vocab_size)
        self.task.check(self)
        if self.waits_for_epochs:
            self._check_in_epochs()
            return
        _ = self.plan  # raises where two branches do not fit together
        self._check_training()
        if self.drop.keeps_special:
            self._check_special_tokens()

    def _check_training(self) -> None:
        """Raises ValueError where this model, method and plan can't be trained as `train` says."""
        self.train.check(steps=self.steps, dropout=self.model.dropout)
        check_fp8(self.train, width=self.model.width, method=self.drop)
        if self.train.attention == "measured" and (
            self.model.kind == "bert" or self.train.group > 1 or self.model.dropout
        ):
            raise ValueError(
                "train.attention: measured times attention without padding, dropout and groups of workers, which this"
                " job has; want auto, or a kernel's name"
            )
        if self.train.compile == "static":
            self._check_static()
        if self.train.cuda_graphs and not self.scaling.gpus_per_worker:
            raise ValueError("train.cuda_graphs: want scaling.gpus_per_worker of at least 1; a CPU has none")
        for plan in (self.plan, self._longest_plan):
            self.train.check_activations(plan)

    def _check_in_epochs(self) -> None:
        """Raises ValueError where no epoch, neither a short nor a long one, makes this job right."""
        if self.data.sources:
            raise ValueError("data.sources: want durations in steps, tokens or %; an epoch is one of data.corpus")
        if (short := self._fault_of_epochs(1)) and (long := self._fault_of_epochs(_LONG_EPOCH)):
            raise ValueError(short if short == long else f"{short}, where an epoch is 1 step")

    def _fault_of_epochs(self, steps: int) -> str | None:
        """Why this job would be wrong with epochs of so many steps."""
        try:
            replace(self, data=replace(self.data, epoch_samples=steps * self.train.global_batch))
        except ValueError as error:
            return str(error)
        return None

    def _check_static(self) -> None:
        """Raises ValueError where it is not known, or too large, how many graphs layers have."""
        if not self.drop.has_known_shapes:
            why = "its schedule" if self.drop.adaptive else f"method '{self.drop.method}'"
            raise ValueError(f"train.compile: static wants shapes that are known before, which {why} lacks; want true")
        if (shapes := len(layer_shapes(self.plan))) > MOST_STATIC:
            raise ValueError(
                f"train.compile: static wants at most {MOST_STATIC} pairs of micro batch and tokens that layers see,"
                f" this plan has {shapes}; want drop.buckets, or true"
            )

    def _check_special_tokens(self) -> None:
        special = self.task.special_tokens
        shortest = min((kept for segment in self.plan.segments for kept in segment.kept), default=special)
        if not 0 < special <= shortest:
            raise ValueError(
                "drop.keep_special_tokens: want pairs of sentences or images, and kept lengths of at least"
                f" {special or SPECIAL_TOKENS}, their special tokens; got a task of kind '{self.task.kind}' and a kept"
                f" length of {shortest}"
            )

    def __repr__(self) -> str:
        """Without secrets: Ray shows it to everybody in its dashboard."""
        return redact(
            f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self))})"
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all workers."""
        return self._clock(total_steps=0).tokens_per_step

    @property
    def steps(self) -> int:
        """Optimizer steps of the run; a length in tokens or epochs is rounded up to whole steps.

        Raises:
            UserError: it `waits_for_epochs`.
        """
        if self.waits_for_epochs:
            raise UserError(
                "data.epoch_samples: a plan in epochs wants the number of training samples; 'tokendrop prepare' tells"
                " it, 'tokendrop train' counts it"
            )
        with naming("train.length"):
            return ceil(self._clock(total_steps=0).steps(self.train.length))

    @property
    def clock(self) -> Clock:
        """What turns the job's durations into steps."""
        return self._clock(total_steps=self.steps)

    def _clock(self, *, total_steps: int) -> Clock:
        return Clock(
            global_batch=self.train.global_batch,
            sequence_length=self.model.sequence_length,
            sequences_per_sample=self.task.sequences_per_sample,
            total_steps=total_steps,
            epoch_samples=self.data.epoch_samples,
        )

    @property
    def waits_for_epochs(self) -> bool:
        """Whether its corpus has to be prepared before it can be planned: nothing else says how long an epoch is."""
        return self.data.epoch_samples is None and any(one.unit == "epochs" for one in durations(self))

    def in_steps(self, duration: Duration) -> int:
        """A duration as whole steps, at least 1."""
        return max(1, round(self.clock.steps(duration)))

    @property
    def checkpoint_steps(self) -> int:
        """Steps between two checkpoints."""
        return self.in_steps(self.checkpoint.every)

    @property
    def decided(self) -> Mapping[str, tuple[int, ...]]:
        """The kept lengths that are decided until now of each `adaptive` schedule, by key below `drop`."""
        return {key: schedule.decided for key, schedule in self.drop.adaptive.items()}

    @property
    def undecided(self) -> "ExperimentConfig":
        """The same job with nothing decided."""
        return self.with_decided(dict.fromkeys(self.decided, ()))

    def with_decided(self, decided: Mapping[str, Sequence[int]]) -> "ExperimentConfig":
        """The same job with other kept lengths decided; its plan is theirs up to the next decision, and beyond it what
        is expected."""
        return replace(self, drop=self.drop.with_decided(decided)) if decided != self.decided else self

    @cached_property
    def plan(self) -> RunPlan:
        """The whole run, step by step; laid out once, when the job is checked.

        Raises:
            ValueError: two branches do not fit together; the message names the keys.
        """
        fixed = self.fixed_plan
        every = self.checkpoint_steps
        with naming("scaling"):
            return self.scaling.apply(fixed, self.clock, is_begun=any(self.decided.values()), checkpoint_steps=every)

    @property
    def most_workers(self) -> int:
        """The most workers that the run may have, whatever is decided as it goes."""
        if self.drop.adaptive and self.scaling.mode != "fixed":
            return self.scaling.most_workers
        return max(segment.workers for segment in self.plan.segments)

    @cached_property
    def fixed_plan(self) -> RunPlan:
        """The same run on `scaling.workers` at every step."""
        self.train.check_group(kind=self.model.kind, heads=self.model.heads, dropout=self.model.dropout)
        self.scaling.check_groups(self.train.group, key=self.train.group_key)
        if not any(self.decided.values()):
            return self._fixed_plan(self.drop)
        undecided = self.drop.with_decided(dict.fromkeys(self.decided, ()))
        # what the learning rate decays over is no matter of decisions, so that none changes it for what is done
        expected = self._fixed_plan(undecided).layer_tokens(self.steps)
        return self._fixed_plan(self.drop, lr_layer_tokens=expected)

    @property
    def _longest_plan(self) -> RunPlan:
        """The plan whose kept lengths end highest of all that may be decided: who grows last has most left to spend."""
        always = {key: one.always(self.clock, wants=False).decided for key, one in self.drop.adaptive.items()}
        return self._fixed_plan(self.drop.with_decided(always)) if always else self.plan

    def _fixed_plan(self, drop: DropConfig, *, lr_layer_tokens: int | None = None) -> RunPlan:
        train, head_tokens = self.train, self.task.head_tokens(self)
        shape = replace(self.model.shape, head_drops=drop.cuts, head_tokens=head_tokens)
        with naming("train.global_batch"):
            batch = BatchSplit(
                global_batch=train.global_batch,
                micro_batch=train.micro_batch,
                world_size=self.scaling.workers,
                sequences_per_sample=self.task.sequences_per_sample,
                group=train.group,
            )
        routes = drop.planned(shape.layers, self.clock)
        with naming(drop.usual[0]):
            check_countable(list(dict.fromkeys(route.kept for route in routes)), self.steps)
        with naming("train.warmup"):
            plan = build_plan(
                steps=self.steps,
                routes=routes,
                counts=drop.counts,
                learned=drop.learns,
                shape=shape,
                batch=batch,
                lr_clock=train.lr_clock,
                warmup_steps=round(self.clock.steps(train.warmup)),
                peak_lr=train.peak_lr,
                final_lr=train.final_lr,
                decay=train.decay,
                cooldown_steps=round(self.clock.steps(train.cooldown)),
                sharding=train.sharding,
                growth=train.growth(dropout=self.model.dropout),
                lr_layer_tokens=lr_layer_tokens,
            )
        return replace(plan, state_bytes=train.state_bytes, group_split=train.group_split)
