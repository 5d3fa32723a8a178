"""How one global batch is shared out."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """Global batch = world size x micro batch x accumulation, all in sequences.

    Micro batches are numbered over the global batch, so what is in one does not depend on the world size.
    """

    global_batch: int
    micro_batch: int
    world_size: int

    def __post_init__(self) -> None:
        if min(self.global_batch, self.micro_batch, self.world_size) < 1:
            raise ValueError(f"want sizes of at least 1, got {self}")
        if self.global_batch % (self.micro_batch * self.world_size):
            raise ValueError(
                f"global batch {self.global_batch} must be a multiple of micro batch {self.micro_batch}"
                f" x {self.world_size} workers = {self.micro_batch * self.world_size}"
            )

    @property
    def accumulation(self) -> int:
        """Micro batches that each rank runs for one optimizer step."""
        return self.global_batch // (self.micro_batch * self.world_size)

    def micro_batches(self, rank: int) -> range:
        """Numbers, within the global batch, of the micro batches that `rank` runs."""
        return range(rank, self.global_batch // self.micro_batch, self.world_size)

    def merged(self, most: int) -> "BatchSplit":
        """The same global batch with as many of each rank's micro batches run as one as `most` sequences hold.

        Ranks keep their samples; where even a micro batch has more sequences than that, it stays as it is.
        """
        fits = range(max(1, min(self.accumulation, most // self.micro_batch)), 0, -1)
        together = next(some for some in fits if self.accumulation % some == 0)
        return replace(self, micro_batch=together * self.micro_batch)

    def places(self, number: int) -> range:
        """Places within the global batch of the samples of a micro batch."""
        return range(number * self.micro_batch, (number + 1) * self.micro_batch)
