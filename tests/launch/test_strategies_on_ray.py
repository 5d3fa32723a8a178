"""Every strategy that a job can name, through whole runs on Ray: what two workers train is what one does."""

from pathlib import Path

import numpy as np
import pytest

from runs import config_of, losses, write_job
from sharing import HAS_DEEPSPEED
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.launch.trainer import run_training
from tokendrop.launch.worker import run_worker
from tokendrop.launch.worker_spec import WorkerSpec
from tokendrop.track.journal import read_steps
from tokendrop.track.run_folder import describe_run, open_run_folder, read_attempts
from tokendrop.train.engines.deepspeed import DeepSpeedEngine

FLOAT32 = 1e-6  # losses of runs that differ in nothing but the order of their sums
WIDTH, VOCABULARY = 32, 4096
ZERO = [f"train.strategy=deepspeed train.zero_stage={stage}" for stage in (1, 2, 3)]
LEGS = ["train.strategy=ddp", ZERO[0], "train.strategy=fsdp", *ZERO[1:]]  # two steps each
IN_GROUPS = ["train.tensor_parallel=2", "train.strategy=fsdp train.context_parallel=2"]
# a step does not depend on how long the run is, which so goes on leg by leg
SETTINGS = ["train.decay=constant", "train.warmup=1 step", "train.precision=fp32"]
SETTINGS += [f"model.width={WIDTH}", f"model.vocab_size={VOCABULARY}", "checkpoint.every=2 steps"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("strategies"))


def go_on_alone(config: ExperimentConfig, run: Path, data: Path) -> None:
    """As one worker, in this process."""
    run_worker(WorkerSpec(config=config, run=run, data=data))


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed: pip install 'tokendrop[deepspeed]'")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_each_strategy_goes_on_from_what_another_has_saved_and_all_have_the_losses_of_one_worker(job: Path) -> None:
    assert DeepSpeedEngine.whole_below < VOCABULARY * WIDTH  # else stage 3 has nothing to share out
    goes_on_leg_by_leg(job, LEGS)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_workers_in_groups_have_the_losses_of_one_worker_and_go_on_from_each_other(job: Path) -> None:
    goes_on_leg_by_leg(job, IN_GROUPS)


def goes_on_leg_by_leg(job: Path, legs: list[str]) -> None:
    """Asserts that two workers train leg by leg, and one the last two steps, what one trains."""
    steps = 2 * len(legs) + 2
    settings = [*SETTINGS, f"drop.schedule.until={steps - 1} steps"]
    run: Path | None = None
    for number, leg in enumerate(legs):
        length = f"train.length={2 * number + 2} steps"
        config = config_of(job, *settings, *leg.split(), length, "scaling.workers=2")
        result = run_training(config, resume=run)
        assert result["steps"] == 2 * number + 2
        run = Path(result["run"])
    assert run is not None
    whole, data = config_of(job, *settings, f"train.length={steps} steps"), open_run_folder(run)[1]
    alone = run.with_name(f"{run.name} alone")
    go_on_alone(whole, run, data)  # from what the last strategy has saved

    alone.mkdir()
    describe_run(alone, whole, prepare(whole))
    go_on_alone(whole, alone, data)
    ours, theirs = read_steps(run), read_steps(alone)
    assert [attempt["attempt_from"] for attempt in read_attempts(run)[0]] == list(range(0, steps, 2))
    assert [row["world_size"] for row in ours] == [2] * (steps - 2) + [1] * 2
    assert len({row["kept_length"] for row in ours}) > 2
    for key in ("step", "kept_length", "layer_tokens", "lr"):
        assert [row[key] for row in ours] == [row[key] for row in theirs]
    np.testing.assert_allclose(losses(run), losses(alone), rtol=FLOAT32)
