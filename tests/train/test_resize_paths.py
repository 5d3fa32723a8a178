"""Any path of resizes and deaths between the sizes that share the global batch out trains what one worker does."""

from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from groups import apart, together, train_until
from sharing import job
from tokendrop.track.journal import read_ledger, read_steps

FLOAT64 = 1e-10  # losses of runs that differ in nothing but the order of their sums
STEPS, SAVED_EVERY = 10, 2
JOBS = {strategy: job(strategy, "fp64") for strategy in ("ddp", "fsdp")}
GLOBAL_BATCH, MICRO_BATCH = JOBS["ddp"].train.global_batch, JOBS["ddp"].train.micro_batch
SIZES = [workers for workers in range(1, 5) if GLOBAL_BATCH % (workers * MICRO_BATCH) == 0]

Leg = tuple[str, int, int]
"""A strategy, workers, and the step at which they are lost: what they have not saved is done again."""


@st.composite
def paths(draw: st.DrawFn) -> list[Leg]:
    stops = [*sorted(draw(st.sets(st.integers(1, STEPS - 1), min_size=1, max_size=4))), STEPS]
    return [(draw(st.sampled_from(sorted(JOBS))), draw(st.sampled_from(SIZES)), stop) for stop in stops]


def test_losses_and_samples_are_the_same_on_any_path_of_resizes_and_deaths(tmp_path: Path) -> None:
    assert SIZES == [1, 2, 4]
    apart(walk, tmp_path)


def walk(folder: Path) -> None:
    """Many paths, in a process from which workers are forked; the one that is wrong is in what this raises."""
    uninterrupted = folder / "uninterrupted"
    together(1, train_until, JOBS["ddp"], uninterrupted, STEPS, start_method="fork")

    @given(paths())
    @settings(
        deadline=None, max_examples=6, phases=[Phase.reuse, Phase.generate]
    )  # to find a shorter path takes minutes
    def is_the_same_on(path: list[Leg]) -> None:
        run = Path(mkdtemp(dir=folder))
        for strategy, workers, stop in path:
            together(workers, train_until, JOBS[strategy], run, stop, start_method="fork")
        assert_same_run(run, uninterrupted)
        assert [row["world_size"] for row in read_steps(run)] == sizes_of(path)

    is_the_same_on()


def sizes_of(path: list[Leg]) -> list[int]:
    """Workers by step, as the last ones that did it."""
    sizes, start = [0] * STEPS, 0
    for _, workers, stop in path:
        sizes[start:stop] = [workers] * (stop - start)
        start = stop - stop % SAVED_EVERY
    return sizes


def assert_same_run(run: Path, other: Path) -> None:
    ours, theirs = read_steps(run), read_steps(other)
    for key in ("loss", "grad_norm", "val_loss"):
        found, expected = ([row[key] or 0.0 for row in rows] for rows in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=FLOAT64, err_msg=key)
    for key in ("step", "lr", "kept_length", "layer_tokens"):
        assert [row[key] for row in ours] == [row[key] for row in theirs]
    assert len({row["kept_length"] for row in ours}) > 2
    trained = sorted(sample for row in read_ledger(run) for sample in row["sample_ids"])
    assert trained == list(range(STEPS * GLOBAL_BATCH))
