"""What a kind of device costs in time and money, and how long an optimizer step takes on so many of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log
from typing import Literal

from tokendrop.schedule.batch import BatchSplit
from tokendrop.schedule.costs import ModelShape
from tokendrop.schedule.traffic import ALONE, GroupShare, Passes, Sharding, traffic

STATE_BYTES = 12
"""Of one parameter in a checkpoint: the weight and AdamW's two moments, float32."""
_MOST_LOSSES = 3600  # of a node in an hour
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
    gather_bytes_per_s: float | None = None
    """The same of all-gathers and reduce-scatters; as of all-reduces where left out."""
    latency_s: float
    """Of one message."""

    def __post_init__(self) -> None:
        if min(self.bytes_per_s, self._gather_bytes_per_s) < 1 or self.latency_s < 0:
            raise ValueError("want bytes_per_s and gather_bytes_per_s of at least 1 and latency_s of at least 0")

    @property
    def _gather_bytes_per_s(self) -> float:
        return self.bytes_per_s if self.gather_bytes_per_s is None else self.gather_bytes_per_s

    def ring_s(self, passes: Passes, members: int) -> float:
        """A ring's time for rounds over `members`: each sends (n - 1) / n of the bytes, n - 1 messages a round."""
        sent_s = passes.summed / self.bytes_per_s + passes.gathered / self._gather_bytes_per_s
        return (members - 1) * (sent_s / members + passes.messages * self.latency_s)


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
    full_node_slowdown: float = 1.0
    """Times as long a computation takes where all devices of a node are at work as where one is: workers on cores share
    the node's memory and caches. With fewer of them, in proportion."""
    overlap: float = 0.0
    """Share of the last micro batch's backward pass during which gradients travel already; 0..1."""
    update_s_per_parameter: float = 0.0
    """Of gradient clipping and AdamW."""
    checkpoint_bytes_per_s: float
    """Of a checkpoint, to the storage that all workers share, checksums included."""
    restore_bytes_per_s: float | None = None
    """From there; where left out, as fast as to there."""
    resize_s: float
    """Pause of a change of workers, its checkpoint left out: processes start, connect and build the model."""
    node_start_s: float | None = None
    """Until a node that is asked for has joined the cluster; None where it is not known."""
    usd_per_gpu_hour: float | None = None
    node_losses_per_hour: float = 0.0
    """How often one node is lost in an hour: spot machines that are taken back, above all; 0: never."""

    def __post_init__(self) -> None:
        if not self.speeds:
            raise ValueError("speeds: want at least one model")
        if self.devices_per_node < 1 or min(self.checkpoint_bytes_per_s, self._restore_bytes_per_s) < 1:
            raise ValueError("want devices_per_node, checkpoint_bytes_per_s and restore_bytes_per_s of at least 1")
        amounts = (self.update_s_per_parameter, self.resize_s, self.node_start_s or 0, self.usd_per_gpu_hour or 0)
        if not 0 <= self.node_losses_per_hour <= _MOST_LOSSES:
            raise ValueError(f"node_losses_per_hour: want 0 to {_MOST_LOSSES}, got {self.node_losses_per_hour:g}")
        if min(amounts) < 0 or not 0 <= self.overlap <= 1 or self.full_node_slowdown < 1:
            raise ValueError(
                "want update_s_per_parameter, resize_s, node_start_s and usd_per_gpu_hour of at least 0, overlap in"
                " 0..1, and full_node_slowdown of at least 1"
            )

    @property
    def _restore_bytes_per_s(self) -> float:
        return self.checkpoint_bytes_per_s if self.restore_bytes_per_s is None else self.restore_bytes_per_s

    def flops_per_s(self, shape: ModelShape, *, flops: float, micro_batch: int) -> float:
        """FLOP/s that one device achieves on a model: those of known models at the same share of their FLOPs.

        Args:
            flops: of one sequence, by whatever layers and tokens; the mean of those that differ.
        """
        full = shape.flops(kept=shape.sequence_length, dropped_layers=0)
        share = flops / full
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

    def step_s(
        self,
        shape: ModelShape,
        *,
        flops: float,
        batch: BatchSplit,
        sharding: Sharding = "ddp",
        share: GroupShare = ALONE,
    ) -> float:
        """Seconds of one optimizer step: micro batches, what they wait for of the traffic between workers, AdamW.

        Args:
            flops: of one sequence, as of `flops_per_s`.
            share: of each worker in what its group trains together; nothing of what that sends is hidden.
        """
        speed = self.flops_per_s(shape, flops=flops, micro_batch=batch.micro_batch)
        slowdown = self.slowdown(batch.world_size)
        micro_s = slowdown * batch.micro_batch * flops * share.work / speed
        forward_s, backward_s = (1 - _BACKWARD) * micro_s, _BACKWARD * micro_s
        sent, workers = traffic(shape, sharding, share), batch.world_size
        rings = share.size if share.shares_model else 1
        backward_waits_s = self._waited_s(sent.backward, workers, rings, backward_s)
        each_s = self._waited_s(sent.forward, workers, rings, forward_s) + backward_waits_s
        each_s += self.exchange_s(share.passes.of_sequences(batch.micro_batch), share.size)
        last = sent.backward + sent.last_backward
        last_s = self._waited_s(last, workers, rings, backward_s) - backward_waits_s
        update_s = slowdown * share.parameters(shape) * self.update_s_per_parameter
        update_s += self.exchange_s(sent.update, workers, rings) + self.exchange_s(share.update, share.size)
        return batch.accumulation * (micro_s + each_s) + last_s + update_s

    def slowdown(self, world_size: int) -> float:
        """Times as long a computation takes on each of so many workers as on one alone, each node filled first."""
        others = self.devices_per_node - 1
        filled = min(world_size - 1, others) / others if others else 0.0
        return 1 + (self.full_node_slowdown - 1) * filled

    def _waited_s(self, passes: Passes, world_size: int, rings: int, compute_s: float) -> float:
        """What is left of an exchange after the share of a computation that hides it."""
        return max(0.0, self.exchange_s(passes, world_size, rings) - self.overlap * compute_s)

    def exchange_s(self, passes: Passes, world_size: int, rings: int = 1) -> float:
        """Seconds of rounds over all workers: rings within nodes, then between them, each node filled first.

        Args:
            rings: into which the workers fall, neighbours into one each; those of one node share its link to others.
        """
        members, beside = max(1, world_size // rings), min(rings, self.devices_per_node)
        inside = min(members, self.devices_per_node // beside)
        within_s = self.within_node.ring_s(passes, inside)
        return within_s + self.between_nodes.ring_s(passes.of_sequences(beside), ceil(members / inside))

    def pause_s(
        self,
        shape: ModelShape,
        *,
        before: int,
        after: int,
        sharding: Sharding = "ddp",
        state_bytes: int = STATE_BYTES,
        saves: bool = True,
        share: GroupShare = ALONE,
    ) -> float:
        """Seconds of one change of workers: a checkpoint written, the new workers, the checkpoint restored.

        The storage is shared: it takes and gives each byte once, however many workers there are. What one worker reads
        goes on to all that hold it: under DDP everything to everybody, else to each its share.

        Args:
            state_bytes: of one parameter in a checkpoint, its optimizer state among them.
            saves: whether a checkpoint is written; after a loss it is not.
            share: of each worker in what its group holds together: that alone is handed on to it.
        """
        size, rings = shape.parameters * state_bytes, share.size if share.shares_model else 1
        holds = Passes(gathered=share.parameters(shape) * state_bytes, messages=1)
        handed_s = self.exchange_s(holds, after, rings) if sharding == "ddp" else self._handed_s(size, before, after)
        saved_s = size / self.checkpoint_bytes_per_s if saves else 0.0
        return self.resize_s + saved_s + size / self._restore_bytes_per_s + handed_s

    def _handed_s(self, size: int, before: int, after: int) -> float:
        """Shares cut anew; as many workers as before have theirs in files of their own, with nothing to hand on."""
        if before == after or after == 1:
            return 0.0
        link = self.within_node if after <= self.devices_per_node else self.between_nodes
        return link.ring_s(Passes(gathered=size // after, messages=1), 2)


def interpolate(x: float, points: Sequence[tuple[float, float]]) -> float:
    """The value at `x` of the line through the points; before the first and after the last it is flat."""
    points = sorted(points)
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left) if right > left else high
    return points[-1][1]
