"""Workers that train each micro batch together: what is planned of them, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import MEASURED
from task_jobs import images_job
from tiny import experiment
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.schedule.activations import Activations
from tokendrop.schedule.device import Link
from tokendrop.schedule.scaling import ScalingObjective, change_s, legal_sizes, step_s
from tokendrop.schedule.traffic import Passes
from tokendrop.study.identity import settings_of

KEYS = ["tensor_parallel", "context_parallel"]
FREE = Link(bytes_per_s=1e30, latency_s=0.0)
SHAPE = MEASURED.speeds[0].shape


def job(key: str, size: int, *, replicas: int = 1, **changes: object) -> ExperimentConfig:
    heads = {"model__heads": 4, "train__micro_batch": 1}
    return experiment(**{**heads, f"train__{key}": size, "scaling__workers": size * replicas, **changes})


@pytest.mark.parametrize("key", KEYS)
@given(size=st.sampled_from([2, 4]), replicas=st.sampled_from([1, 2, 4, 8]))
def test_groups_train_what_as_many_single_workers_do(key: str, size: int, replicas: int) -> None:
    alone, grouped = (job(key, some, replicas=replicas).plan for some in (1, size))
    assert grouped.batch.replicas == alone.batch.world_size
    for one, other in zip(alone.segments, grouped.segments, strict=True):
        assert replace(other, workers=one.workers) == one
        assert other.workers == one.workers * size
    for number in range(size * replicas):
        assert grouped.batch.micro_batches(number) == alone.batch.micro_batches(number // size)


@pytest.mark.parametrize("key", KEYS)
@given(size=st.sampled_from([2, 4]), replicas=st.sampled_from([1, 2, 4]))
def test_over_free_links_a_group_takes_its_share_of_the_layers_and_all_of_the_head(
    key: str, size: int, replicas: int
) -> None:
    free = replace(MEASURED, within_node=FREE, between_nodes=FREE)
    alone, grouped = (job(key, some, replicas=replicas).plan for some in (1, size))
    segment = grouped.segments[0]
    flops = segment.flops_per_step / grouped.batch.global_batch
    head = grouped.shape.flops_of((), sequences=1, kept=segment.kept_length)
    expected_s = step_s(alone, free, alone.segments[0], replicas) * (head + (flops - head) / size) / flops
    assert step_s(grouped, free, segment, segment.workers) == pytest.approx(expected_s)


@pytest.mark.parametrize("key", KEYS)
def test_what_a_group_sends_takes_time_that_grows_with_its_micro_batches(key: str) -> None:
    free = replace(MEASURED, between_nodes=FREE, within_node=FREE)
    slow = replace(free, within_node=Link(bytes_per_s=1e3, latency_s=0.0))

    def sent_s(replicas: int) -> float:
        plan = job(key, 2, replicas=replicas).plan
        segment = plan.segments[0]
        passes = plan.group_share(segment).passes * segment.micro_batch
        waits_s = (step_s(plan, one, segment, segment.workers) for one in (slow, free))
        last = next(waits_s) - next(waits_s)
        assert last >= segment.accumulation * slow.exchange_s(passes, 2) > 0
        each_s = segment.accumulation * slow.exchange_s(passes, 2)
        if key == "tensor_parallel":  # and once a step the gradients of what both have whole
            whole = (plan.shape.parameters - plan.shape.layer_parameters) * 4
            assert plan.group_share(segment).update == Passes(summed=2 * whole, messages=2)
            assert last >= each_s + slow.exchange_s(plan.group_share(segment).update, 2)
        return each_s

    assert sent_s(1) == pytest.approx(4 * sent_s(4))


@pytest.mark.parametrize("key", KEYS)
def test_an_exchange_in_a_group_serves_a_whole_micro_batch_and_waits_once_for_each_link(key: str) -> None:
    free = replace(MEASURED, within_node=FREE, between_nodes=FREE)
    late = replace(free, within_node=Link(bytes_per_s=1e30, latency_s=1.0))

    def waits(micro_batch: int) -> tuple[int, float]:
        """Micro batches of a step, and seconds that links take beside the bytes."""
        plan = job(key, 2, train__micro_batch=micro_batch).plan
        times = [step_s(plan, one, plan.segments[0], 2) for one in (late, free)]
        return plan.segments[0].accumulation, times[0] - times[1]

    plan = job(key, 2).plan
    (many, longer_s), (few, shorter_s) = waits(1), waits(4)
    assert many == 4 * few
    assert longer_s - shorter_s == pytest.approx((many - few) * plan.group_share(plan.segments[0]).passes.messages)


@pytest.mark.parametrize("key", KEYS)
def test_a_worker_is_handed_what_it_holds_of_a_checkpoint(key: str) -> None:
    """Under `ddp`: all of it, or its share of the layers where its group shares these out, by rings of replicas."""
    slow = replace(MEASURED, within_node=Link(bytes_per_s=1e3, latency_s=0.0), devices_per_node=8)
    free = replace(slow, within_node=FREE)
    plan = job(key, 2, replicas=4).plan
    handed_s = [change_s(plan, one, 2, 8) for one in (slow, free)]
    layers = plan.shape.layer_parameters
    held = plan.shape.parameters - (layers - layers // 2 if key == "tensor_parallel" else 0)
    members = 4 if key == "tensor_parallel" else 8
    assert handed_s[0] - handed_s[1] == pytest.approx(held * plan.state_bytes * (members - 1) / members / 1e3)


@given(size=st.sampled_from([2, 4, 8]), devices=st.sampled_from([1, 2, 8]))
def test_a_group_alone_has_nobody_to_share_gradients_with_wherever_it_is(size: int, devices: int) -> None:
    nodes = replace(MEASURED, devices_per_node=devices)
    passes = Passes(summed=10**9, messages=2)
    assert nodes.exchange_s(passes, size, rings=size) == 0
    # two groups: each worker sends to its counterpart, over a link that those of one node share
    twice, link = nodes.exchange_s(passes, 2 * size, rings=size), nodes.between_nodes
    if 2 * size > devices:
        assert twice == pytest.approx(link.ring_s(passes.of_sequences(min(size, devices)), 2))


@pytest.mark.parametrize("key", KEYS)
@given(size=st.integers(2, 8), again=st.booleans(), product_bytes=st.sampled_from([2, 4]))
def test_a_group_keeps_less_each_but_no_less_than_its_share(
    key: str, size: int, again: bool, product_bytes: int
) -> None:
    alone = Activations(product_bytes=product_bytes)
    work = [(2, 4, SHAPE.sequence_length), (4, 4, 9)]
    whole, part = (
        one.kept_bytes(SHAPE, work, sequences=4, kept=9, again=again) for one in (alone, replace(alone, **{key: size}))
    )
    assert whole / size <= part < whole


@pytest.mark.parametrize("key", KEYS)
def test_planned_workers_are_whole_groups(key: str) -> None:
    scaling = {"mode": "schedule", "profile": "a100-40g-8", "workers": 4, "max_workers": 8, "minimise": "time"}
    config = job(key, 2, scaling=scaling)
    assert {segment.workers % 2 for segment in config.plan.segments} == {0}
    bounds = ScalingObjective(min_workers=1, max_workers=9, minimise="time")
    assert legal_sizes(config.fixed_plan, bounds) == [2, 4, 8]


@pytest.mark.parametrize("key", KEYS)
def test_a_trial_keeps_its_name_whatever_its_groups_are(key: str) -> None:
    assert settings_of(job(key, 2, replicas=2)) == settings_of(job(key, 1))


MISTAKES = {
    "workers": ({"scaling__workers": 3}, r"scaling\.workers: want a multiple of train\.{key}=2, got 3"),
    "one worker": ({"scaling__workers": 1}, r"scaling\.workers: want a multiple of train\.{key}=2, got 1"),
    "segments": (
        {"scaling": {"mode": "schedule", "workers": 2, "segments": [{"from": "0%", "workers": 1}]}},
        r"scaling\.segments\.workers: want a multiple of train\.{key}=2, got 1",
    ),
    "min_workers": (
        {"scaling": {"mode": "schedule", "workers": 8, "min_workers": 3, "profile": "a100-40g-8"}},
        r"scaling\.min_workers: want a multiple of train\.{key}=2, got 3",
    ),
    "max_workers": (
        {"scaling": {"mode": "schedule", "workers": 2, "max_workers": 5, "profile": "a100-40g-8"}},
        r"scaling\.max_workers: want a multiple of train\.{key}=2, got 5",
    ),
    "a batch too small": ({"scaling__workers": 6}, r"global batch 8 must be .* micro batch 1 x 3 groups of 2 workers"),
    "none": ({"train__{key}": 0}, r"want {key} of at least 1, got 0"),
    "dropout": ({"model__dropout": 0.1}, r"train\.{key}: .*; want model\.dropout: 0, got 0\.1"),
    "graphs": ({"train__compile": True}, r"compile: not with {key}=2"),
}
OF_TENSORS = {
    "both": ({"train__context_parallel": 2}, r"context_parallel: not beside tensor_parallel; .* got 2 and 2"),
    "heads": ({"model__heads": 1}, r"model\.heads: train\.tensor_parallel=2 .*; want a multiple of it, got 1"),
    "ZeRO": (
        {"train__strategy": "deepspeed", "train__precision": "fp32"},
        r"tensor_parallel: strategy 'deepspeed' has none; want ddp or fsdp",
    ),
    "muon": ({"train__optimizer": "muon"}, r"tensor_parallel: optimizer 'muon' needs each matrix whole"),
}


@pytest.mark.parametrize(
    ("key", "mistake"),
    [*((key, one) for key in KEYS for one in MISTAKES), *(("tensor_parallel", one) for one in OF_TENSORS)],
)
def test_what_no_group_can_train_is_refused_by_its_key(key: str, mistake: str) -> None:
    changes, text = (MISTAKES | OF_TENSORS)[mistake]
    with pytest.raises((ValueError, UserError), match=text.replace("{key}", key)):
        job(key, 2, **{name.replace("{key}", key): value for name, value in changes.items()})


@pytest.mark.parametrize("key", KEYS)
def test_images_are_refused(key: str) -> None:
    with pytest.raises((ValueError, UserError), match=rf"train\.{key}: want a model of kind gpt or bert .*'vit'"):
        images_job(**{f"train__{key}": 2, "scaling__workers": 2})
