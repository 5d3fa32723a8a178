"""What the planner charges for is what workers send, counted at torch's own collectives."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from groups import together
from sharing import HAS_DEEPSPEED
from tiny import Rows, experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.schedule.traffic import traffic
from tokendrop.train.engines.deepspeed import DeepSpeedEngine
from tokendrop.train.worker import build_engine
from traffic import CountedTraffic

ZERO = [{"train__strategy": "deepspeed", "train__zero_stage": stage} for stage in (1, 2, 3)]
HOW = [{"train__strategy": "ddp"}, {"train__strategy": "fsdp"}, *(ZERO if HAS_DEEPSPEED else [])]


EACH = [1, 2, 3]  # micro batches of a step on each of two workers


def job(how: dict[str, object], each: int) -> ExperimentConfig:
    """On two workers; wide enough that biases and norms, which no plan counts, are few."""
    sizes = {"model__width": 64, "model__vocab_size": 512, "train__global_batch": 2 * each, "train__micro_batch": 1}
    return experiment(**sizes, train__precision="fp32", **how)


JOBS = {(config.train.sharding, each): config for each in EACH for config in (job(how, each) for how in HOW)}


def count_each(folder: Path) -> None:
    """The second step's: at the first, strategies make what they need."""
    DeepSpeedEngine.whole_below = 0
    for (sharding, each), config in JOBS.items():
        engine = build_engine(config, torch.device("cpu"))[0]
        rows = Rows(config, world_size=dist.get_world_size(), rank=dist.get_rank())
        for step in (0, 1):
            with CountedTraffic() as counted:
                for number, batch in enumerate(rows.of_step(step)):
                    engine.forward_backward(batch, share=0.5, last_micro_batch=number == each - 1)
                engine.step(lr=0.01, max_grad_norm=1.0)
        found = {"bytes": counted.bytes.total(), "calls": counted.calls.total()}
        (folder / f"{sharding} {each} {dist.get_rank()}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traffic")
    together(2, count_each, folder)
    return folder


@pytest.mark.parametrize(("sharding", "each"), JOBS)
def test_a_step_sends_what_it_is_charged_for(counted: Path, sharding, each: int) -> None:
    charged = traffic(JOBS[sharding, each].model.shape, sharding).of_step(each)
    for rank in (0, 1):
        found = json.loads((counted / f"{sharding} {each} {rank}.json").read_text())
        assert found["bytes"] == pytest.approx(charged.bytes, rel=0.04)
        if sharding == "fsdp":
            assert found["calls"] == charged.messages
