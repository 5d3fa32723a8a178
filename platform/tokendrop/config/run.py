"""Where a run takes place and what it leaves behind."""

from dataclasses import dataclass

from tokendrop.schedule.duration import Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Workers of the run and what each of them holds."""

    workers: int = 1
    cpus_per_worker: int = 2
    """CPU cores, and torch threads, of one worker."""
    gpus_per_worker: int = 0
    max_restarts: int = 3
    """How often a lost worker may restart the run from its last checkpoint."""
    peer_timeout_s: float = 120.0
    """A worker that keeps the others waiting longer counts as lost."""

    def __post_init__(self) -> None:
        if self.peer_timeout_s < 1:
            raise ValueError(f"want peer_timeout_s of at least 1, got {self.peer_timeout_s:g}")
        if self.workers < 1 or self.cpus_per_worker < 1 or self.gpus_per_worker < 0 or self.max_restarts < 0:
            raise ValueError(
                "want workers and cpus_per_worker of at least 1, gpus_per_worker and max_restarts of at least 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved; the last step always is."""

    every: Duration = Duration.parse("10%")
    keep: int = 2
    """Checkpoints kept: the newest ones."""

    def __post_init__(self) -> None:
        if self.every.amount <= 0 or self.keep < 1:
            raise ValueError(f"want every above 0 and keep of at least 1, got {self.every} and {self.keep}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig:
    """MLflow."""

    uri: str | None = "sqlite:///mlflow.db"
    """A tracking URI; null turns tracking off."""
    experiment: str = "tokendrop"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Validation loss during the run, on the held-out documents, with no token dropped."""

    every: Duration = Duration.parse("10%")
    sequences: int = 256
    """Held-out sequences a validation reads, over all workers; fewer where fewer were held out."""

    def __post_init__(self) -> None:
        if self.every.amount <= 0 or self.sequences < 1:
            raise ValueError(f"want every above 0 and sequences of at least 1, got {self.every} and {self.sequences}")
