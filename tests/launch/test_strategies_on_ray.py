"""Every strategy that a job can name, through whole runs on Ray: what two workers train is what one does."""

from pathlib import Path

import numpy as np
import pytest

from runs import config_of, losses, write_job
from sharing import HAS_DEEPSPEED
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.launch.trainer import run_training
from tokendrop.launch.worker import WorkerSpec, run_worker
from tokendrop.track.journal import read_steps
from tokendrop.track.run_folder import describe_run, open_run_folder, read_attempts
from tokendrop.train.engines.deepspeed import DeepSpeedEngine

FLOAT32 = 1e-6  # losses of runs that differ in nothing but the order of their sums
STEPS, WIDTH, VOCABULARY = 12, 32, 4096
ZERO = [f"train.strategy=deepspeed train.zero_stage={stage}" for stage in (1, 2, 3)]
LEGS = ["train.strategy=ddp", ZERO[0], "train.strategy=fsdp", *ZERO[1:]]  # two steps each
# a step does not depend on how long the run is, which so goes on leg by leg
SETTINGS = ["train.decay=constant", "train.warmup=1 step", "drop.schedule.until=11 steps", "train.precision=fp32"]
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
    run: Path | None = None
    for number, leg in enumerate(LEGS):
        length = f"train.length={2 * number + 2} steps"
        config = config_of(job, *SETTINGS, *leg.split(), length, "scaling.workers=2")
        result = run_training(config, resume=run)
        assert result["steps"] == 2 * number + 2
        run = Path(result["run"])
    assert run is not None
    whole, data, alone = config_of(job, *SETTINGS), open_run_folder(run)[1], job.parent / "alone"
    go_on_alone(whole, run, data)  # from what the last strategy has saved

    alone.mkdir()
    describe_run(alone, whole, prepare(whole))
    go_on_alone(whole, alone, data)
    ours, theirs = read_steps(run), read_steps(alone)
    assert [attempt["attempt_from"] for attempt in read_attempts(run)[0]] == list(range(0, STEPS, 2))
    assert [row["world_size"] for row in ours] == [2] * (STEPS - 2) + [1] * 2
    assert len({row["kept_length"] for row in ours}) > 3
    for key in ("step", "kept_length", "layer_tokens", "lr"):
        assert [row[key] for row in ours] == [row[key] for row in theirs]
    np.testing.assert_allclose(losses(run), losses(alone), rtol=FLOAT32)
