"""What `tokendrop plan --simulate` prints, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tokendrop.cli.main import main

JOB = str(Path(__file__).parents[2] / "jobs" / "paper" / "gpt3_1.3b_ltd.yaml")
RATE = "scaling.profile.node_losses_per_hour="
SPOT = ("scaling.profile=a100-40g-8", f"{RATE}0.01", "scaling.mode=schedule", "scaling.deadline_hours=116")
SIMULATE = ("--simulate", "50")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["plan", JOB, *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_three_policies_are_told_beside_the_plan(capsys) -> None:
    result = printed(capsys, *SPOT, *SIMULATE)
    simulated = result.pop("simulated")
    assert result == printed(capsys, *SPOT)
    assert (simulated["simulations"], simulated["seed"]) == (50, 0)
    assert [*simulated["policies"]] == ["fixed", "schedule", "availability"]
    for figures in simulated["policies"].values():
        for one in (figures["wall_clock_s"], figures["gpu_hours"], figures["cost"]):
            assert one["p5"] < one["p50"] < one["p95"]
            assert one["p5"] < one["mean"] < one["p95"]
        assert figures["cost"]["mean"] == pytest.approx(1.3 * figures["gpu_hours"]["mean"])
        assert figures["useful_gpu_hours"] < figures["gpu_hours"]["p5"]
        assert 0 < figures["losses"] < figures["steps_again"]


def test_each_policy_has_its_own_workers(capsys) -> None:
    """Those of the fixed plan, of the plan, and the most; seen where next to nothing is lost."""
    rare = (*SPOT, f"{RATE}1e-12", "scaling.workers=32", "scaling.max_workers=64")
    result = printed(capsys, *rare, *SIMULATE)
    most = printed(capsys, "scaling.profile=a100-40g-8", "scaling.workers=64")
    found = {name: one["wall_clock_s"]["mean"] for name, one in result["simulated"]["policies"].items()}
    assert found["fixed"] == pytest.approx(result["wall_clock_s_fixed"])
    assert found["schedule"] == pytest.approx(result["wall_clock_s"])
    assert found["availability"] == pytest.approx(most["wall_clock_s"])


def test_losses_are_waited_for_on_a_fixed_size_alone(capsys) -> None:
    late = (*SPOT, "scaling.mode=fixed", "scaling.deadline_hours=null", "scaling.profile.node_start_s=36000")
    policies = printed(capsys, *late, *SIMULATE)["simulated"]["policies"]
    assert policies["fixed"]["wall_clock_s"]["p5"] > policies["schedule"]["wall_clock_s"]["p95"]
    assert policies["schedule"] == policies["availability"]


def test_a_short_run_is_not_said_to_take_nothing(capsys) -> None:
    job = str(Path(JOB).parents[1] / "pretrain" / "quickstart.yaml")
    main(["plan", job, "scaling.profile=h200-8", f"{RATE}1", *SIMULATE])
    out = capsys.readouterr().out
    figures = [line.split("  ")[-1] for line in out.splitlines() if line.startswith(("hours,", "GPU-hours,", "USD,"))]
    assert len(figures) == 9
    assert all(float(figure) > 0 for figure in figures)
    (expected,) = (line for line in out.splitlines() if line.startswith("expected"))
    assert all(float(figure) > 0 for figure in re.findall(r"[\d.e-]+(?= s| GPU)|(?<=\$)[\d.e-]+", expected))


def test_patience_is_that_of_the_job(capsys) -> None:
    """Where nodes come late, groups of fewer workers than planned follow each other."""
    late = (*SPOT, f"{RATE}0.1", "scaling.deadline_hours=null", "scaling.profile.node_start_s=7200", *SIMULATE)
    soon, never = (printed(capsys, *late, f"scaling.patience_s={s}")["simulated"]["policies"] for s in (1, 1000000))
    assert soon["fixed"] == never["fixed"]
    assert soon["availability"]["wall_clock_s"]["mean"] < never["availability"]["wall_clock_s"]["mean"]


def test_people_read_the_same_figures(capsys) -> None:
    simulated = printed(capsys, *SPOT, *SIMULATE)["simulated"]["policies"]
    main(["plan", JOB, *SPOT, *SIMULATE])
    out = capsys.readouterr().out
    assert "50 simulated runs, seed 0: a node is lost 0.01 times an hour, and 120 s later another one is there." in out
    for name, figures in simulated.items():
        hours = [figures["wall_clock_s"][key] / 3600 for key in ("mean", "p5", "p50", "p95")]
        assert re.search(rf"^hours, {name} +{' +'.join(f'{one:,.2f}' for one in hours)}$", out, re.MULTILINE)
        assert re.search(rf"^nodes lost, {name} +{figures['losses']:,.2f}$", out, re.MULTILINE)


def test_a_seed_says_which_losses(capsys) -> None:
    first, again, other = (printed(capsys, *SPOT, *SIMULATE, "--seed", seed)["simulated"] for seed in "112")
    assert first == again
    assert first["policies"] != other["policies"]


WRONG = {
    (*SIMULATE,): "--simulate: want scaling.profile, a device profile with node_losses_per_hour",
    ("scaling.profile=h200-8", *SIMULATE): "--simulate: 'h200-8' has no losses of nodes; want",
    (
        *SPOT,
        "scaling.profile.node_start_s=null",
        *SIMULATE,
    ): "--simulate: 'a100-40g-8' does not say scaling.",
    (*SPOT, "--seed", "1"): "--seed: it is that of --simulate; want both, or neither",
    (*SPOT, "--simulate", "1"): "--simulate: want a whole number from 2 to 100,000, got '1'",
    (*SPOT, f"{RATE}0.05"): f"{JOB}: scaling: deadline_hours=116 can't be met: with 1 to 64 workers this run takes 14",
    (*SPOT, f"{RATE}-1"): f"{JOB}: scaling.profile.node_losses_per_hour: want 0 to 3600, got -1",
    (*SPOT, f"{RATE}1e9"): f"{JOB}: scaling.profile.node_losses_per_hour: want 0 to 3600, got 1e+09",
    (
        *SPOT,
        f"{RATE}300",
        "scaling.deadline_hours=null",
        *SIMULATE,
    ): "--simulate: node_losses_per_hour: a simulated",
    ("scaling.profile=h200", f"{RATE}1"): "scaling.profile: want a100-40g-8, h200-8 or a .yaml or .json file",
}


@pytest.mark.parametrize("arguments", WRONG, ids=lambda arguments: " ".join(arguments)[-40:])
def test_what_can_not_be_simulated_is_told_in_a_sentence(arguments: tuple[str, ...], complaint) -> None:
    assert complaint("plan", JOB, *arguments).startswith(WRONG[arguments])
