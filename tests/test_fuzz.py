"""Whatever happens to a job, a run, its checkpoints or its token shards: the same result, or one sentence."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from commands import Outcome, outcome_of
from mutations import Mutation, mutations
from runs import config_of, write_job
from tokendrop.launch.trainer import run_training

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

EXAMPLES = 60  # of each kind
HANGS_S = 60.0
REPORTS = {"audit", "verify"}  # whose own output says what is damaged

# what is mutated, below the folder of all: the commands that read it
COMMANDS: dict[str, list[list[str]]] = {
    "runs/one": [["data", "audit", "runs/one"], ["evaluate", "runs/one"], ["data", "stats", "runs/one"]],
    "runs/one/checkpoints": [["evaluate", "runs/one"], ["export", "runs/one", "--to", "exported"]],
    "data": [["data", "verify", "SHARDS"], ["data", "show", "SHARDS", "--sample", "7"], ["evaluate", "runs/one"]],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """A folder with a job, its token shards and a finished run."""
    folder = tmp_path_factory.mktemp("whole")
    job = write_job(folder)
    run_training(config_of(job, "run=one", "checkpoint.keep=2"))
    shutil.copytree(folder, folder.with_name("kept"))
    return folder


def ran(whole: Path, command: list[str]) -> Outcome:
    (shards,) = [path for path in (whole / "data").iterdir() if path.is_dir()]
    paths = {"runs/one": whole / "runs" / "one", "SHARDS": shards, "exported": whole / "exported"}
    shutil.rmtree(whole / "exported", ignore_errors=True)
    return outcome_of(*(paths.get(word, word) for word in command), "--json", timeout_s=HANGS_S)


@pytest.fixture(scope="module")
def expected(whole: Path) -> dict[str, str]:
    """What each command prints when nothing is damaged."""
    found: dict[str, str] = {}
    for command in {tuple(one): one for some in COMMANDS.values() for one in some}.values():
        outcome = ran(whole, command)
        assert outcome.code == 0, outcome.err
        found[" ".join(command)] = outcome.out
    return found


def restore(whole: Path) -> None:
    """Put everything back as it was, at the same place."""
    shutil.rmtree(whole)
    shutil.copytree(whole.with_name("kept"), whole)


def assert_told(outcome: Outcome, command: list[str], undamaged: str) -> None:
    """The same result, or an exit code of 1 or 2 with one sentence; another result only where it is said why."""
    assert outcome.code in (0, 1, 2), f"exit code {outcome.code}: {outcome.err}"
    assert "Traceback" not in outcome.err
    if outcome.code == 0:
        assert outcome.out == undamaged or "counts in its place" in outcome.err  # the checkpoint before
    elif outcome.code == 1 and REPORTS & set(command) and outcome.out:
        assert json.loads(outcome.out) != json.loads(undamaged)
    else:
        assert outcome.err.splitlines()[-1].startswith("tokendrop: ")
        assert outcome.err.count("tokendrop: ") == 1


@pytest.mark.parametrize("target", COMMANDS)
@settings(derandomize=True, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(mutation=mutations())
def test_damage_is_told_or_does_not_show(
    whole: Path, expected: dict[str, str], target: str, mutation: Mutation
) -> None:
    mutation.strike(whole / target)
    try:
        commands = COMMANDS[target]
        command = commands[int(mutation.where * len(commands) * 7) % len(commands)]
        assert_told(ran(whole, command), command, expected[" ".join(command)])
    finally:
        restore(whole)


@settings(derandomize=True, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(mutation=mutations())
def test_a_mutated_job_is_a_job_or_a_mistake(whole: Path, mutation: Mutation, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("job")
    shutil.copy(whole / "tiny.yaml", folder)
    mutation.strike(folder)
    outcome = outcome_of("plan", folder / "tiny.yaml", "--json", timeout_s=HANGS_S)
    assert outcome.code in (0, 2), outcome.err
    if outcome.code == 2:
        assert outcome.err.startswith(f"tokendrop: {folder / 'tiny.yaml'}: ")
        assert outcome.err.count("\n") == 1
    else:
        assert json.loads(outcome.out)["steps"] > 0
