"""Models, batches and runs small enough to test in milliseconds."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import build
from tokendrop.config.model import GptConfig
from tokendrop.models.batch import Batch, TextBatch
from tokendrop.models.gpt import Gpt
from tokendrop.models.layer import recompute_layers
from tokendrop.train.task import Loss

SEED = 1234
TOKENS, BATCH = 16, 3


def gpt_config(**changes: object) -> GptConfig:
    sizes = {"layers": 4, "width": 16, "heads": 2, "sequence_length": TOKENS, "vocab_size": 50}
    return GptConfig(**{**sizes, **changes})  # pyright: ignore[reportArgumentType]


def gpt(*, dtype: torch.dtype = torch.float64, recompute: bool = False, **changes: object) -> Gpt:
    """A model with random weights, large enough that layers matter; the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = Gpt(gpt_config(**changes)).to(dtype)
        recompute_layers(model, again=recompute)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def token_rows(batch: int = BATCH, *, seed: int = SEED, vocab_size: int = 50) -> tuple[Tensor, Tensor]:
    """Input ids and labels, (B, S) each."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(vocab_size, (batch, TOKENS + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of `loss` by parameter name; the model keeps none."""
    model.zero_grad()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], *, tolerance: float = 0.0) -> None:
    """Equal keys and values; without a tolerance bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def experiment(**changes: object) -> ExperimentConfig:
    """A run of 6 steps that drops tokens; `changes` are dotted keys with `__` for the dots."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "model": {"kind": "gpt", "layers": 4, "width": 16, "heads": 2, "sequence_length": TOKENS, "vocab_size": 50},
        "data": {"corpus": ["unused"]},
        "train": {
            "length": "6 steps",
            "global_batch": 8,
            "micro_batch": 4,
            "peak_lr": 0.01,
            "warmup": "2 steps",
            "lr_clock": "layer_token",
            "precision": "fp64",
        },
        "drop": {"method": "random_ltd", "schedule": {"kind": "linear", "start": 4, "until": "80%", "increment": 3}},
        "checkpoint": {"every": "2 steps"},
        "evaluate": {"every": "3 steps"},
    }
    for dotted, value in changes.items():
        *branches, leaf = dotted.split("__")
        branch = tree
        for key in branches:
            branch = branch.setdefault(key, {})
        branch[leaf] = value
    return build(ExperimentConfig, tree, "")


class Rows:
    """`Batches` of random tokens: a row is a function of its sample id, which is its place in the run."""

    def __init__(self, config: ExperimentConfig, *, world_size: int = 1, rank: int = 0) -> None:
        self.split = replace(config.plan.batch, world_size=world_size)
        self.rank = rank

    def of_step(self, step: int) -> Iterator[Batch]:
        for number in self.split.micro_batches(self.rank):
            first = step * self.split.global_batch + number * self.split.micro_batch
            yield rows_of(range(first, first + self.split.micro_batch), number=number)

    def validation(self) -> list[tuple[Batch, int]]:
        """Two batches of rows on every worker; one counts on the first group of workers, the other on the last."""
        both = [rows_of(range(first, first + self.split.micro_batch)) for first in (10**6, 10**6 + 100)]
        counts_on = 0, self.split.replicas - 1
        return [
            (batch, self.split.micro_batch if self.split.replica(self.rank) == replica else 0)
            for batch, replica in zip(both, counts_on, strict=True)
        ]


def loss_of(model: torch.nn.Module, batch: Batch) -> Loss:
    """What the model returns for its inputs."""
    return Loss(model(**batch.inputs()))


def rows_of(sample_ids: range, *, number: int = 0) -> TextBatch:
    rows = torch.cat([torch.cat(token_rows(1, seed=sample), dim=0)[None] for sample in sample_ids])
    return TextBatch(
        input_ids_BS=rows[:, 0], labels_BS=rows[:, 1], sample_ids_B=torch.tensor(list(sample_ids)), numbers=(number,)
    )
