"""What a run of very many workers meets, without the workers: a cluster, their ledgers, token shards, checkpoints."""

import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.shards.format import FORMAT, TOKENIZER, Header, Place, Shard, append_shard
from tokendrop.elastic import policy
from tokendrop.elastic.decide import ScalingDecider
from tokendrop.elastic.policy import SchedulePolicy
from tokendrop.track.decisions import DecidedJob
from tokendrop.train.storage import Written

_ROWS = 2**22  # of each source
_EACH = 8
"""Workers of a node."""


@dataclass(slots=True)
class FakeCluster:
    """Answers for Ray: nodes of eight places each, some of which leave or are taken by other runs."""

    nodes: tuple[str, ...]
    leaving: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()
    held: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    """How often Ray was asked for what."""

    @classmethod
    def of(cls, workers: int) -> "FakeCluster":
        """One that holds so many workers."""
        return cls(tuple(f"{number:056x}" for number in range(-(-workers // _EACH))))

    def group(self, workers: int) -> Any:
        """A group of so many workers on the first nodes that stay."""
        homes = [node for node in self.nodes if node not in self.leaving | self.taken for _ in range(_EACH)][:workers]
        self.held = Counter(homes)
        members = [SimpleNamespace(metadata=SimpleNamespace(node_id=node)) for node in homes]
        return SimpleNamespace(workers=members, num_workers=workers, start_time=0.0)

    def get_draining_nodes(self) -> dict[str, int]:
        """As Ray's state has it: nodes that leave, with their deadlines."""
        self.calls["draining"] += 1
        return dict.fromkeys(self.leaving, 0)

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        """As Ray's state has it: what nobody holds."""
        self.calls["available"] += 1
        free = {node: 0 if node in self.taken else _EACH - self.held[node] for node in self.nodes}
        return {node: {"CPU": 8.0 * places, "GPU": float(places)} for node, places in free.items()}

    def reserved(self) -> dict[str, dict[str, float]]:
        """As Ray's coordinator has it: what it keeps for this run."""
        self.calls["reserved"] += 1
        return {node: {"CPU": 8.0 * _EACH, "GPU": float(_EACH)} for node in self.nodes if node not in self.taken}

    @contextmanager
    def policy(self, scaling: Any, job: DecidedJob, decider: ScalingDecider) -> Iterator[SchedulePolicy]:
        """The policy of a run, which takes this cluster for Ray while the block runs."""
        with patch.multiple(policy, cluster_state=self, is_autoscaler_v2=lambda fetch_from_server: True):
            yield _FakePolicy(scaling, job, decider, self)


class _FakePolicy(SchedulePolicy):
    """One that asks a fake cluster where the other asks Ray's coordinator."""

    def __init__(self, scaling: Any, job: DecidedJob, decider: ScalingDecider, cluster: FakeCluster) -> None:
        super().__init__(scaling, job, decider)
        self.cluster = cluster

    def _request(self, workers: int) -> None:
        self.cluster.calls["request"] += workers != self._requested
        self._requested = workers

    def _reserved(self) -> Any:
        return self.cluster.reserved()


class Gathered:
    """Ledgers that all ranks give to rank 0, which calls this last; as pickles, of which networks take no time."""

    def __init__(self) -> None:
        self._given: list[bytes] = []

    def give(self, ledger: Any) -> list[Any]:
        """By each other rank."""
        self._given.append(pickle.dumps(ledger))
        return []

    def take(self, ledger: Any) -> list[Any]:
        """By rank 0: those of all."""
        given, self._given = self._given, []
        return [ledger, *map(pickle.loads, given)]


def write_shards(folder: Path, config: ExperimentConfig) -> None:
    """Token shards of which the manifest alone is there."""
    folder.mkdir(parents=True)
    (folder / TOKENIZER).write_text("{}")
    names, length = tuple(source.name for source in config.data.mixture), config.plan.shape.sequence_length
    Header(
        format=FORMAT,
        kind="text",
        sequence_length=length,
        row_length=length + 1,
        vocab_size=config.model.vocab_size,
        tokenizer_sha256="",
        sources=names,
        files=(),
        is_complete=True,
        rows=(_ROWS * len(names), 0, 0),
    ).write(folder)
    place = Place(file=0, record=1, token=0, seen=0)
    for name in names:
        file = f"{name}-train-00000.arrow"
        made = Shard(source=name, split="train", file=file, rows=_ROWS, bytes=1, sha256="", subsets=(), next=place)
        append_shard(folder, made)


def fake_state(config: ExperimentConfig, world_size: int, *, sharded: bool) -> dict[str, TensorStorageMetadata]:
    """Weights and AdamW's two moments of a job's model, as torch describes them once they are saved.

    Args:
        sharded: each cut along its first dimension for all workers, as FSDP does; else whole, as DDP leaves them.
    """
    with torch.device("meta"):
        model = config.task.build(config).build_model(seed=0)
    state: dict[str, TensorStorageMetadata] = {}
    for name, parameter in model.named_parameters():
        chunks = [
            ChunkStorageMetadata(torch.Size([start, *[0] * (parameter.dim() - 1)]), shape)
            for start, shape in _shards(parameter.shape, world_size if sharded else 1)
        ]
        for key in (f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"):
            properties = TensorProperties(dtype=torch.float32)
            state[key] = TensorStorageMetadata(properties, parameter.shape, chunks)
    return state


def _shards(shape: torch.Size, pieces: int) -> list[tuple[int, torch.Size]]:
    each = -(-shape[0] // pieces)
    return [(start, torch.Size([min(each, shape[0] - start), *shape[1:]])) for start in range(0, shape[0], each)]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a part lies, as torch's writer of files says it."""

    relative_path: str
    offset: int
    length: int


def fake_parts(folder: Path, state: Mapping[str, TensorStorageMetadata], world_size: int) -> list[list[Any]]:
    """What the ranks say of the parts that they have written; their files are as long as said, and empty of data."""
    results: list[list[Any]] = [[] for _ in range(world_size)]
    ends, turn = [0] * world_size, 0
    for name, tensor in state.items():
        for number, chunk in enumerate(tensor.chunks):
            rank = number if len(tensor.chunks) > 1 else turn % world_size
            turn += 1
            length = 4 * chunk.sizes.numel()
            place = _Stored(f"__{rank}_0.distcp", ends[rank], length)
            results[rank].append(WriteResult(MetadataIndex(name, chunk.offsets), length, place))
            ends[rank] += length
    for rank, of_rank in enumerate(results):
        if of_rank:
            file = folder / f"__{rank}_0.distcp"
            file.touch()
            with file.open("r+b") as opened:
                opened.truncate(ends[rank])
            crc32s = {one.storage_data.offset: 2**31 for one in of_rank}
            of_rank.append(Written(name=file.name, bytes=ends[rank], sha256="0" * 64, crc32s=crc32s))
    return results
