"""What every worker of a run is told; light to import, for the driver and Ray Train's controller."""

from dataclasses import dataclass
from pathlib import Path

from tokendrop.config.experiment import ExperimentConfig
from tokendrop.launch.stored import Stored
from tokendrop.models.batch import HeldOut


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A run, as its workers see it."""

    config: ExperimentConfig
    run: Path
    data: Path
    held_out: HeldOut | None = None
    """Validation rows, for workers that do not share the folder of the token shards."""
    stored: Stored | None = None
    """Of a run that a store keeps."""
    leads: bool | None = None
    """Whether a worker makes the run folder ready for those that share it; rank 0 does when left out."""
