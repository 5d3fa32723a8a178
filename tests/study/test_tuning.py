"""What Ray Tune is given for a sweep."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps import trials_of, write_sweep
from tokendrop.study.progress import Progress
from tokendrop.study.record import SweepRecord
from tokendrop.study.sweep import load_sweep
from tokendrop.study.tuning import _all_jobs, _scheduler

LONG = {"train.length": "60 steps", "evaluate.every": "5 steps"}
DROPS = {"method": "random_ltd", "schedule": {"kind": "linear", "start": 8, "until": "50%", "increment": 8}}


@settings(max_examples=20, deadline=None)
@given(left=st.sets(st.integers(0, 3), min_size=1))
def test_trials_are_compared_from_the_same_layer_tokens_on_whichever_are_left(tmp_path_factory, left):
    folder = tmp_path_factory.mktemp("sweep")
    axes = {"drop": [DROPS, {"method": "none"}], "train.peak_lr": [1e-3, 2e-3]}
    path = write_sweep(folder, axes=axes, set={**LONG, "model.layers": 3}, scheduler={"kind": "asha"})
    sweep, trials = load_sweep(path), trials_of(path)
    progress = Progress(sweep, trials, SweepRecord(folder / "runs", sweep.name))

    def rungs(ready: dict[str, object]) -> str:
        return _scheduler(progress, _all_jobs(ready, progress)).debug_string()

    every = {trial.run: trial.config for trial in trials}
    some = {trial.run: trial.config for place, trial in enumerate(trials) if place in left}
    assert rungs(some) == rungs(every)
    grown = trials[0].config.plan
    first = next(one.start for one in grown.segments if set(one.kept) == {32})
    assert f"{float(grown.layer_tokens(first)):.3f}" in rungs(some)
