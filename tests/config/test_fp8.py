"""Which jobs can have their layers multiply in fp8, and what else a job is by it."""

import json

import pytest

from tiny import experiment
from tokendrop.cli.main import main
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
from tokendrop.launch.resume import settings
from tokendrop.study.identity import differences, run_name, settings_of

FP8 = {"train__precision": "auto", "train__fp8": "tensorwise"}
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "widths": (
        {"model__width": 24, "model__heads": 2},
        "model.width: with train.fp8 want a multiple of 16, got 24",
    ),
    "fp32": ({"train__precision": "fp32"}, "train.precision: with train.fp8 .* want bf16 or auto, got 'fp32'"),
    "fp64": ({"train__precision": "fp64"}, "train.precision: with train.fp8 .* want bf16 or auto, got 'fp64'"),
    "deepspeed": (
        {"train__strategy": "deepspeed"},
        "train.fp8: not with strategy 'deepspeed'; want train.strategy",
    ),
    "tensor parallel": (
        {"train__tensor_parallel": 2, "scaling__workers": 2, "train__micro_batch": 2},
        "train.fp8: not with train.tensor_parallel=2, .* want 1, or no fp8",
    ),
    "context parallel": (
        {"train__context_parallel": 2, "scaling__workers": 2, "train__micro_batch": 2},
        "train.fp8: not with train.context_parallel=2, .* want 1, or no fp8",
    ),
    "layer dropout": (
        {"drop": {"method": "layer_dropout", "keep": 0.5}},
        "train.fp8: method 'layer_dropout' may leave a layer no sequence at all, .* want another drop.method",
    ),
    "another recipe": ({"train__fp8": "blockwise"}, "train.fp8: want one of tensorwise, rowwise, .*got 'blockwise'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_job_that_can_not_have_it_is_refused_in_a_sentence(case: str) -> None:
    changes, sentence = REFUSED[case]
    with pytest.raises(UserError, match=rf"^{sentence}") as refused:
        experiment(**FP8 | changes)
    assert "\n" not in str(refused.value)
    if case != "another recipe":
        experiment(**{"train__precision": "auto"} | changes)


def test_to_emulate_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"^train\.fp8_emulated: without train\.fp8 it would do nothing; want that too"):
        experiment(train__fp8_emulated=True)


@pytest.mark.parametrize("precision", ["auto", "bf16"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_others_can(recipe: str, precision: str) -> None:
    config = experiment(**FP8 | {"train__fp8": recipe, "train__precision": precision, "train__strategy": "fsdp"})
    assert config.train.fp8 == recipe


def name(config: ExperimentConfig) -> str:
    return run_name(settings_of(config))


def test_trials_without_it_keep_the_names_that_they_had() -> None:
    """The name was recorded before the key was there."""
    assert name(experiment()) == "trial-109eb53bcf04"
    assert not [key for key in settings_of(experiment()) if "fp8" in key]


def test_it_makes_another_trial_and_to_emulate_it_does_not() -> None:
    plain, fp8 = experiment(train__precision="auto"), experiment(**FP8)
    rowwise, emulated = experiment(**FP8 | {"train__fp8": "rowwise"}), experiment(**FP8, train__fp8_emulated=True)
    assert len({name(plain), name(fp8), name(rowwise)}) == 3
    assert name(emulated) == name(fp8)
    assert differences(settings_of(plain), settings_of(fp8)) == {"train.fp8": (None, "tensorwise")}
    assert settings(plain) != settings(fp8) == settings(emulated)  # what a run that goes on keeps to


def test_the_plan_says_it_and_counts_as_before(tmp_path, capsys) -> None:
    job = tmp_path / "job.yaml"
    sizes = "{kind: gpt, layers: 4, width: 32, heads: 2, sequence_length: 32, vocab_size: 64}"
    training = "{length: 9 steps, global_batch: 4, micro_batch: 2, peak_lr: 1.0e-3}"
    job.write_text(f"name: small\nmodel: {sizes}\ndata: {{corpus: [none]}}\ntrain: {training}\n")
    results = []
    for overrides in ([], ["train.fp8=rowwise"]):
        main(["plan", str(job), *overrides, "--json"])
        results.append(json.loads(capsys.readouterr().out))
    plain, fp8 = results
    assert fp8 == plain | {"fp8": "rowwise"}
    main(["plan", str(job), "train.fp8=rowwise"])
    said = "\nfp8            matrix products of the layers, rowwise scales; hours do not count what it saves\n"
    assert said in capsys.readouterr().out
    main(["plan", str(job)])
    assert "fp8" not in capsys.readouterr().out
