"""How one global batch is shared out."""

from dataclasses import dataclass


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

    def places(self, number: int) -> range:
        """Places within the global batch of the samples of a micro batch."""
        return range(number * self.micro_batch, (number + 1) * self.micro_batch)
