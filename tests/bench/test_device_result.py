"""What `tokendrop bench device` makes of times."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendrop.bench.device import Wanted, job_of
from tokendrop.bench.device_model import (
    FEWEST_ROUNDS,
    PLAIN,
    SHARES,
    UPDATE,
    FirstSteps,
    Measured,
    expected_s,
    kept_lengths,
)
from tokendrop.bench.device_result import main_figures, model_result
from tokendrop.bench.device_save import Save

JOB = job_of("gpt3-350m", Wanted(minutes=9, precision="fp32", rounds=3), compiled=False)
SAVE = Save(bytes=1, blocked_s=1, committed_s=1, first_blocked_s=1, took_s=30)
FIRST = FirstSteps(
    alone_s=[1.0],
    first_s=dict.fromkeys([*SHARES, PLAIN], 1.0),
    peak_bytes=dict.fromkeys([*SHARES, PLAIN]),
    host_waits=None,
    save=SAVE,
)


@given(st.floats(1e-6, 1e-2))
def test_layers_that_save_all_of_their_flops_reach_the_theory_but_for_the_update(update_s: float) -> None:
    """Here forward and backward take time in proportion to their FLOPs."""
    shape, dropped = JOB.model.shape, len(JOB.plan.dropped_layers)
    works = {
        share: 1e-14 * shape.flops(kept=kept, dropped_layers=dropped)
        for share, kept in kept_lengths(shape.sequence_length).items()
    }
    seconds = {share: [work_s + min(update_s, work_s)] for share, work_s in works.items()}
    seconds |= {UPDATE: [update_s], PLAIN: seconds["1/1"]}
    found: Any = model_result(
        JOB, Measured(first=FIRST, seconds=seconds, rounds=1, build_s=1, setup_s=1, round_s=1), None
    )
    whole, without = (
        found[name]["realised_over_theoretical"]["median"] for name in ("schedule", "schedule_without_update")
    )
    assert without == pytest.approx(1, abs=0.01)  # between two lengths FLOPs are not on a line
    assert whole < without
    assert main_figures(found)["realised_over_theory_without_update_350m"]["median"] == without


@pytest.mark.parametrize("save", [None, SAVE])
def test_a_larger_model_is_expected_to_compile_by_its_layers_and_to_save_by_its_parameters(save: Save | None) -> None:
    before = Measured(first=replace(FIRST, save=save), seconds={}, rounds=3, build_s=0, setup_s=40, round_s=2)
    saves_s = 0 if save is None else save.took_s
    steps_s = (FEWEST_ROUNDS + 1) * 2 * 5
    assert expected_s(before, layers=2, parameters=4, work=5) == 2 * (40 - saves_s) + 4 * saves_s + steps_s
    assert expected_s(before, layers=0.5, parameters=0.5, work=5) == 40 + steps_s
