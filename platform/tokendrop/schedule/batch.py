"""How one global batch is shared out."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """Global batch = replicas x micro batch x accumulation, all in samples.

    Micro batches are numbered over the global batch, so what is in one does not depend on the world size.
    """

    global_batch: int
    micro_batch: int
    world_size: int
    sequences_per_sample: int = 1
    """All of which are trained: one for each answer, where a model learns to choose one."""
    group: int = 1
    """Consecutive ranks that train the same micro batches together, each a part of the model or of the tokens."""

    def __post_init__(self) -> None:
        sizes = self.global_batch, self.micro_batch, self.world_size, self.sequences_per_sample, self.group
        if min(sizes) < 1:
            raise ValueError(f"want sizes of at least 1, got {self}")
        if self.world_size % self.group:
            raise ValueError(f"want workers in groups of {self.group}, got {self.world_size}")
        if self.global_batch % (self.micro_batch * self.replicas):
            what = "workers" if self.group == 1 else f"groups of {self.group} workers"
            raise ValueError(
                f"global batch {self.global_batch} must be a multiple of micro batch {self.micro_batch}"
                f" x {self.replicas} {what} = {self.micro_batch * self.replicas}"
            )

    @property
    def replicas(self) -> int:
        """Groups of ranks, each of which trains on micro batches of its own."""
        return self.world_size // self.group

    def replica(self, rank: int) -> int:
        """The number of a rank's group."""
        return rank // self.group

    @property
    def in_sequences(self) -> "BatchSplit":
        """The same split counted in sequences: what is computed, where `self` is what is read."""
        each = self.sequences_per_sample
        return replace(
            self, global_batch=each * self.global_batch, micro_batch=each * self.micro_batch, sequences_per_sample=1
        )

    @property
    def accumulation(self) -> int:
        """Micro batches that each rank runs for one optimizer step."""
        return self.global_batch // (self.micro_batch * self.replicas)

    def world_sizes(self, least: int, most: int) -> list[int]:
        """Numbers of workers, rising from at least `least` to at most `most`, that share the micro batches evenly."""
        micro_batches = self.global_batch // self.micro_batch
        replicas = range(max(1, -(-least // self.group)), min(most // self.group, micro_batches) + 1)
        return [some * self.group for some in replicas if micro_batches % some == 0]

    def micro_batches(self, rank: int) -> range:
        """Numbers, within the global batch, of the micro batches that `rank` runs."""
        return range(self.replica(rank), self.global_batch // self.micro_batch, self.replicas)

    def merged(self, most: int) -> "BatchSplit":
        """The same global batch with as many of each rank's micro batches run as one as `most` sequences hold.

        Ranks keep their samples; where even a micro batch has more sequences than that, it stays as it is.
        """
        fits = range(max(1, min(self.accumulation, most // self.in_sequences.micro_batch)), 0, -1)
        together = next(some for some in fits if self.accumulation % some == 0)
        return replace(self, micro_batch=together * self.micro_batch)

    def places(self, number: int) -> range:
        """Places within the global batch of the samples of a micro batch."""
        return range(number * self.micro_batch, (number + 1) * self.micro_batch)
