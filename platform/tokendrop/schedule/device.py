"""What a kind of device costs in time and money, and how long an optimizer step takes on so many of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log
from typing import Literal

from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape

_GRADIENT_BYTES = 4  # of one parameter; gradients are float32
_STATE_BYTES = 12  # of one parameter in a checkpoint: the weight and AdamW's two moments, float32
_BACKWARD = 2 / 3  # share of a micro batch's time, as of its FLOPs


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """How fast forward and backward are at one kept length: seconds measured, or FLOP/s that are known."""

    kept_length: int
    micro_batch: int = 1
    """Sequences that ran at a time."""
    seconds: float | None = None
    """Of one micro batch, forward and backward."""
    flops_per_s: float | None = None
    """Achieved by one device."""

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.flops_per_s is None):
            raise ValueError("want either seconds or flops_per_s")
        if min(self.seconds or 0, 1) < 1e-9 and (self.flops_per_s or 0) < 1:
            raise ValueError("want seconds of at least 1e-9, or flops_per_s of at least 1")
        if self.micro_batch < 1:
            raise ValueError(f"want a micro_batch of at least 1, got {self.micro_batch}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpeed:
    """One model on one device, over kept lengths and micro batches."""

    model: str
    shape: ModelShape
    dropped_layers: int
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        shape = self.shape
        if min(shape.layers, shape.width, shape.sequence_length, shape.vocab_size, shape.mlp_width) < 1:
            raise ValueError("shape: want sizes of at least 1")
        if not self.points:
            raise ValueError("points: want at least one")
        for point in self.points:
            self._flops(point.kept_length)

    def flops_per_s(self, *, share: float, micro_batch: int) -> float:
        """FLOP/s achieved where a sequence asks for `share` of its FLOPs at full length.

        Seconds per sequence are interpolated over the FLOPs, then over micro batches. Fewer FLOPs than at the
        shortest kept length take the time of that; more than at the longest take time in proportion.
        """
        full = self._flops(self.shape.sequence_length)
        sizes = sorted({point.micro_batch for point in self.points})
        seconds = [(float(size), self._sequence_s(share * full, size)) for size in sizes]
        return share * full / interpolate(micro_batch, seconds)

    def _sequence_s(self, flops: float, micro_batch: int) -> float:
        points = [(float(self._flops(p.kept_length)), p) for p in self.points if p.micro_batch == micro_batch]
        line = sorted((f, f / p.flops_per_s if p.flops_per_s else (p.seconds or 0) / micro_batch) for f, p in points)
        return interpolate(flops, line) * max(1.0, flops / line[-1][0])

    def _flops(self, kept: int) -> int:
        return self.shape.flops(kept=kept, dropped_layers=self.dropped_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What gradients travel over."""

    bytes_per_s: float
    """One way. Within a node: of each device. Between nodes: of a node, whose devices share it."""
    latency_s: float
    """Of one message."""

    def __post_init__(self) -> None:
        if self.bytes_per_s < 1 or self.latency_s < 0:
            raise ValueError("want bytes_per_s of at least 1 and latency_s of at least 0")

    def all_reduce_s(self, size: float, members: int) -> float:
        """A ring's time to sum `size` bytes over `members`: each sends 2 (n - 1) / n of them in 2 (n - 1) messages."""
        return 2 * (members - 1) * (size / members / self.bytes_per_s + self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A kind of device and the nodes that it comes in."""

    name: str
    kind: Literal["measured", "derived"]
    source: str
    """Where the figures come from: the command, or the publication and the arithmetic."""
    speeds: tuple[ModelSpeed, ...]
    """A model that is not among them is scaled by its FLOPs, between the two that are next to it in size."""
    devices_per_node: int
    within_node: Link
    between_nodes: Link
    overlap: float = 0.0
    """Share of the last micro batch's backward pass during which gradients travel already; 0..1."""
    update_s_per_parameter: float = 0.0
    """Of gradient clipping and AdamW."""
    checkpoint_bytes_per_s: float
    """To and from the storage that all workers share."""
    resize_s: float
    """Pause of a change of workers, its checkpoint left out: processes start, connect and load."""
    usd_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        if not self.speeds:
            raise ValueError("speeds: want at least one model")
        if self.devices_per_node < 1 or self.checkpoint_bytes_per_s < 1:
            raise ValueError("want devices_per_node and checkpoint_bytes_per_s of at least 1")
        if (
            min(self.update_s_per_parameter, self.resize_s, self.usd_per_gpu_hour or 0) < 0
            or not 0 <= self.overlap <= 1
        ):
            raise ValueError(
                "want update_s_per_parameter, resize_s and usd_per_gpu_hour of at least 0, and overlap in 0..1"
            )

    def flops_per_s(self, shape: ModelShape, *, dropped_layers: int, kept: int, micro_batch: int) -> float:
        """FLOP/s that one device achieves on a model: those of known models at the same share of their FLOPs."""
        full = shape.flops(kept=shape.sequence_length, dropped_layers=0)
        share = shape.flops(kept=kept, dropped_layers=dropped_layers) / full
        return interpolate(
            log(full / shape.sequence_length),
            [
                (
                    log(s.shape.flops(kept=length, dropped_layers=0) / length),
                    s.flops_per_s(share=share, micro_batch=micro_batch),
                )
                for s in self.speeds
                for length in [s.shape.sequence_length]
            ],
        )

    def step_s(self, shape: ModelShape, *, dropped_layers: int, kept: int, batch: BatchSplit) -> float:
        """Seconds of one optimizer step: accumulation x micro batch + what is left of the all-reduce + AdamW."""
        flops = batch.micro_batch * shape.flops(kept=kept, dropped_layers=dropped_layers)
        speed = self.flops_per_s(shape, dropped_layers=dropped_layers, kept=kept, micro_batch=batch.micro_batch)
        micro_s = flops / speed
        hidden_s = self.overlap * _BACKWARD * micro_s
        waited_s = max(0.0, self.all_reduce_s(shape.parameters, batch.world_size) - hidden_s)
        return batch.accumulation * micro_s + waited_s + shape.parameters * self.update_s_per_parameter

    def all_reduce_s(self, parameters: int, world_size: int) -> float:
        """Seconds to sum the gradients: rings within nodes, then between nodes, each node filled before the next."""
        inside, nodes = min(world_size, self.devices_per_node), ceil(world_size / self.devices_per_node)
        size = parameters * _GRADIENT_BYTES
        return self.within_node.all_reduce_s(size, inside) + self.between_nodes.all_reduce_s(size, nodes)

    def pause_s(self, shape: ModelShape) -> float:
        """Seconds of one change of workers: a checkpoint written, the new workers, the checkpoint read."""
        return self.resize_s + 2 * shape.parameters * _STATE_BYTES / self.checkpoint_bytes_per_s


def interpolate(x: float, points: Sequence[tuple[float, float]]) -> float:
    """The value at `x` of the line through the points; before the first and after the last it is flat."""
    points = sorted(points)
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left) if right > left else high
    return points[-1][1]
