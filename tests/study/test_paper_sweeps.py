"""The paper's tables that are sweeps, by what their trials save."""

from pathlib import Path

import pytest

from tokendrop.schedule.plan import RunPlan
from tokendrop.study.sweep import load_sweep
from tokendrop.study.trials import Trial, expand

SWEEPS = Path(__file__).parents[2] / "jobs" / "sweeps"
FIRST_SEED = 1234
SAVED = {
    "paper_ptb_token_bypass": [25, 25, 45.8, 45.8],  # the paper prints none
    "paper_ptb_schedules": [23, 32.1, 32.4],  # 23.0, 32.1, 33.7
    "paper_cifar10_schedules": [16.3, 23.7, 30.7, 30.9],  # 16.5, 23.6, 30.8, 32.3
    "paper_ptb_regularization": [0, 32.4, 27.8, 18.7] * 2,  # none
    "paper_layers_ptb": [35.4, 33.9, 33.9, 32.4],  # none but the last: 33.7
    "paper_layers_wikitext2": [33.2, 31.8, 31.8, 30.4],  # none
    "paper_layers_wikitext103": [33.1, 31.7, 31.7, 30.3],  # none
    "paper_layers_imagenet": [26.8, 24.6, 24.6, 22.3],  # none but the last: 22.3
    "paper_bert_ablation": [0, 14.1, 22.3, 0, 14.1, 22.3, 22.3],  # as here
    "paper_gpt3_1.3b_budgets_baseline": [0] * 5,  # none
    "paper_gpt3_1.3b_budgets_ltd": [30.3] * 3,  # 1/3
    "paper_gpt3_1.3b_equal_layer_tokens": [0, 30.3],  # 1/3
    "paper_gpt3_1.3b_two_thirds": [0, 30.3],  # 1/3
    "paper_gpt3_1.3b": [0, 30.3],  # 33.3
    "paper_gpt3_350m": [0, 30.3],  # 33.3
    "paper_gpt3_350m_lr_clock": [30.3, 30.3],  # none
    "paper_bert_large": [0, 26.2, 31.1],  # as here
    "paper_bert_large_mnli": [0, 0, 0],  # finetuned at full length
    "paper_bert_large_qqp": [0, 0, 0],
    "paper_bert_large_race": [0, 0, 0],
    "paper_bert_special_tokens": [22.3, 22.3],  # 22.2
    "paper_bert_lr_clock": [14.1, 14.1],  # as here
    "paper_vit_imagenet": [0, 22.3],  # as here
    "paper_vit_cifar10": [0, 30.9],  # as here
    "paper_vit_cifar100": [0, 30.9],  # as here
}
BUDGETS = {  # billions of layer tokens, and of tokens
    "paper_gpt3_1.3b_budgets_baseline": [(2880, 120), (4320, 180), (5760, 240), (7200, 300), (8640, 360)],
    "paper_gpt3_1.3b_budgets_ltd": [(2880, 172), (4800, 287), (5760, 344)],
    "paper_gpt3_1.3b_equal_layer_tokens": [(2880, 120), (2880, 172)],
    "paper_gpt3_1.3b_two_thirds": [(7200, 300), (4799, 287)],
}


def trials_of(name: str) -> list[Trial]:
    path = SWEEPS / f"{name}.yaml"
    return [trial for trial in expand(load_sweep(path), path) if trial.config.seed == FIRST_SEED]


def plans_of(name: str) -> list[RunPlan]:
    return [trial.config.plan for trial in trials_of(name)]


@pytest.mark.parametrize("name", sorted(path.stem for path in SWEEPS.glob("paper_*.yaml")))
def test_the_trials_of_a_table_save_what_it_says_or_what_the_header_says(name: str) -> None:
    assert [round(100 * plan.layer_token_saving(), 1) for plan in plans_of(name)] == SAVED[name]


@pytest.mark.parametrize("name", BUDGETS)
def test_runs_within_a_budget_of_the_paper_are_as_long_as_the_header_says(name: str) -> None:
    found = [(plan.layer_tokens(plan.steps), plan.steps * plan.tokens_per_step) for plan in plans_of(name)]
    assert [(round(layer_tokens / 1e9), round(tokens / 1e9)) for layer_tokens, tokens in found] == BUDGETS[name]


def test_token_bypass_and_its_random_twin_drop_tokens_in_the_same_layers() -> None:
    sets = [plan.dropped_layers for plan in plans_of("paper_ptb_token_bypass")]
    assert [set(layers) for layers in sets] == [{*range(11, 23)}] * 2 + [{*range(1, 23)}] * 2


def test_full_length_is_reached_at_epoch_12_whatever_it_begins_with() -> None:
    starts = [plan for plan in plans_of("paper_ptb_regularization") if plan.dropped_layers]
    assert [plan.at(0).kept_length for plan in starts] == [128, 256, 512] * 2
    assert {plan.segments[-1].start for plan in starts} == {398}  # 12 epochs of 1,060 samples, 32 at a time


def test_special_tokens_stay_in_one_trial_of_the_ablation_without_dropout() -> None:
    kept = [trial for trial in trials_of("paper_bert_ablation") if trial.config.drop.keeps_special]
    assert [trial.config.model.dropout for trial in kept] == [0]


@pytest.mark.parametrize("key", ["mnli", "qqp", "race"])
def test_finetuning_begins_with_the_runs_that_the_header_has_trained(key: str) -> None:
    begun = [trial.config.model.init_from for trial in trials_of(f"paper_bert_large_{key}")]
    assert begun == [f"runs/bert-large-{name}" for name in ("baseline", "ltd1", "ltd2")]
    header = (SWEEPS / f"paper_bert_large_{key}.yaml").read_text().partition("base:")[0]
    assert "jobs/paper/bert_large_baseline.yaml run=bert-large-baseline" in header
    assert all((SWEEPS.parent / "paper" / f"bert_large_{name}.yaml").is_file() for name in ("baseline", "ltd1", "ltd2"))
