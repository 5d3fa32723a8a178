"""The devices of workers are those that Ray has assigned to them."""

from types import SimpleNamespace

import pytest
import ray.train.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny import experiment
from tokendrop.errors import UserError
from tokendrop.launch import process_group, train_loop
from tokendrop.launch.process_group import Gpu, check_gpus, gpu_of_this_worker, torch_config

gpus = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["GPU-0", "GPU-1", "GPU-2"]))


@given(found=st.lists(gpus, max_size=6))
def test_workers_have_a_gpu_each(found: list[Gpu]) -> None:
    if len(set(found)) == len(found):
        check_gpus(found)
    else:
        with pytest.raises(UserError, match=r"^scaling.gpus_per_worker: two workers have the same GPU of [ab]; want "):
            check_gpus(found)


@given(found=st.lists(gpus, min_size=1, max_size=6, unique=True), at=st.integers(0, 5))
def test_a_worker_without_the_gpu_that_is_booked_is_told_of(found: list[Gpu], at: int) -> None:
    found[at % len(found)] = ("c", None)
    with pytest.raises(UserError, match=r"^scaling.gpus_per_worker: Ray counts GPUs on c where torch finds none; "):
        check_gpus(found)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose second GPU Ray has assigned to this process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cuda", 1))
    uuids = {torch.device("cuda", 1): "GPU-1"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device]))


@pytest.mark.usefixtures("cuda")
def test_no_gpu_booked_is_the_cpu_even_where_cuda_is_visible() -> None:
    assert train_loop.device_of(experiment().scaling) == torch.device("cpu")
    assert train_loop.device_of(experiment(scaling__gpus_per_worker=1).scaling) == torch.device("cuda", 1)
    assert train_loop.device_of(experiment(scaling__gpus_per_worker=0.5).scaling) == torch.device("cuda", 1)


def test_a_worker_names_its_gpu(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group.socket, "gethostname", lambda: "host")
    assert gpu_of_this_worker() == ("host", "GPU-1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_of_this_worker() == ("host", None)


def test_workers_on_cpus_are_not_connected_by_nccl() -> None:
    assert torch_config(on_gpus=False, timeout_s=5.9).backend == "gloo"
    assert torch_config(on_gpus=True, timeout_s=5.9).backend == "cpu:gloo,cuda:nccl"
    assert torch_config(on_gpus=True, timeout_s=5.9).timeout_s == 5
