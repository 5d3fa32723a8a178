"""A job begins with the weights of another model: Hugging Face's, exactly, or those of a checkpoint of ours."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from images import MODEL as VIT
from tiny import TOKENS, assert_same, experiment, token_rows
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.train.checkpoint import Checkpoints
from tokendrop.train.checkpoint_index import CHECKPOINTS, committed
from tokendrop.train.initial import begin_with, check_sizes, find_initial
from tokendrop.train.worker import build_engine

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

EXACT = 1e-10  # float64
CPU = torch.device("cpu")
GPT2 = {"n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": TOKENS, "vocab_size": 50}
BERT = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
BERT_JOB = {"kind": "bert", "layers": 3, "width": 16, "heads": 2, "sequence_length": TOKENS, "vocab_size": 50}


def saved(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A model with random weights that are large enough to matter, in float64, in a folder."""
    torch.manual_seed(5)
    for parameter in model.double().parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model.eval()


def gpt_job(init_from: object, **changes: object) -> ExperimentConfig:
    return experiment(model__init_from=str(init_from), **changes)


def bert_job(init_from: object, **changes: object) -> ExperimentConfig:
    model = {**BERT_JOB, "init_from": init_from and str(init_from)}
    return experiment(**{"model": model, "task": {"kind": "masked_lm"}, **changes})


def classifying(init_from: object, *labels: str, **changes: object) -> ExperimentConfig:
    """A job that tells labels apart, or without any learns numbers."""
    metrics = ["accuracy"] if labels else ["pearson"]
    task = {"kind": "text_classification", "texts": ["text"], "labels": [*labels], "metrics": metrics}
    return bert_job(init_from, task=task, drop={"method": "none"}, **changes)


def model_of(config: ExperimentConfig) -> Any:
    return build_engine(config, CPU, initial=find_initial(config.model.init_from or "", config.model.kind))[
        0
    ].model.eval()


@pytest.mark.parametrize("shorter", [0, 5])
def test_a_gpt_computes_what_the_gpt2_does_that_it_begins_with(tmp_path: Path, shorter: int) -> None:
    theirs = saved(GPT2LMHeadModel(GPT2Config(**GPT2)), tmp_path)
    config = gpt_job(tmp_path, model__sequence_length=TOKENS - shorter, drop={"method": "none"})
    tokens_BS = token_rows()[0][:, : TOKENS - shorter]
    torch.testing.assert_close(model_of(config).logits(tokens_BS), theirs(tokens_BS).logits, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(("kind", "heads"), [(BertForPreTraining, "sop"), (BertForMaskedLM, "none")])
def test_a_bert_computes_what_the_bert_does_that_it_begins_with(tmp_path: Path, kind: Any, heads: str) -> None:
    theirs = saved(kind(BertConfig(**BERT)), tmp_path)  # of 512 positions, of which the job has the first 16
    model = model_of(bert_job(tmp_path, data__pairs={"sentence_task": heads}, drop={"method": "none"}))
    tokens_BS, mask_BS = token_rows()[0], torch.ones(3, TOKENS, dtype=torch.bool)
    types_BS = (tokens_BS > 25).long()
    hidden_BSD = model.hidden(tokens_BS, types_BS, mask_BS)
    expected = theirs(tokens_BS, token_type_ids=types_BS, attention_mask=mask_BS)
    logits = expected.prediction_logits if heads == "sop" else expected.logits
    torch.testing.assert_close(model.token_logits(hidden_BSD), logits, rtol=EXACT, atol=EXACT)
    if heads == "sop":
        found = model.sentence_logits(hidden_BSD)
        torch.testing.assert_close(found, expected.seq_relationship_logits, rtol=EXACT, atol=EXACT)


def trained(config: ExperimentConfig, run: Path, step: int = 7) -> dict[str, torch.Tensor]:
    """Commits a checkpoint of a run; the weights in it."""
    engine, _ = build_engine(config, CPU)
    meta = {"model": asdict(config.model), "name": config.name}
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=1, meta=meta)
    checkpoints.save(engine, step)
    checkpoints.wait()
    return dict(engine.model.named_parameters())


def test_a_job_begins_with_a_run_or_a_checkpoint_of_ours(tmp_path: Path) -> None:
    weights = trained(experiment(seed=1), tmp_path)
    for place in (tmp_path, committed(tmp_path / CHECKPOINTS)[0]):
        config = gpt_job(place, seed=2, model__preset=None)
        assert_same(dict(model_of(config).named_parameters()), weights)
        engine, _ = build_engine(config, CPU)
        assert not torch.equal(engine.model.tokens.weight, weights["tokens.weight"])


def check(config: ExperimentConfig) -> None:
    source = find_initial(config.model.init_from or "", config.model.kind)
    check_sizes(config.model, source, outputs=config.task.outputs)


def refused(config: ExperimentConfig) -> str:
    with pytest.raises(UserError) as error:
        check(config)
    return str(error.value)


def test_another_model_is_refused_by_the_key_that_differs(tmp_path: Path) -> None:
    saved(GPT2LMHeadModel(GPT2Config(**GPT2)), tmp_path / "gpt2")
    trained(experiment(), tmp_path / "run")
    for place, said in (("gpt2", tmp_path / "gpt2"), ("run", tmp_path / "run" / CHECKPOINTS / "step_000000007")):
        source = tmp_path / place
        assert refused(gpt_job(source, model__heads=4)) == f"model.heads: {said} has 2, this job 4; want 2"
        assert refused(gpt_job(source, model__vocab_size=64)).endswith("has 50, this job 64; want 50")
        assert refused(gpt_job(source, model__sequence_length=32)).endswith("has 16, this job 32; want at most 16")
        assert refused(bert_job(source)).endswith("has gpt, this job bert; want gpt")
        assert refused(gpt_job(source, model__positions="rotary")).startswith("model.positions: ")


def test_another_number_of_labels_wants_a_new_head(tmp_path: Path) -> None:
    saved(BertForSequenceClassification(BertConfig(**BERT, num_labels=3)), tmp_path / "three")
    saved(BertForMultipleChoice(BertConfig(**BERT)), tmp_path / "choices")
    trained(classifying(None, "a", "b", "c"), tmp_path / "run")
    for place, said in (("three", ""), ("run", f"/{CHECKPOINTS}/step_000000007")):
        source = tmp_path / place
        found = f"task.labels: {source}{said} has 3, this job"
        assert refused(classifying(source, "no", "yes")) == f"{found} 2; want 3, or model.new_head=true"
        assert refused(classifying(source)) == f"{found} 1; want 3, or model.new_head=true"
        check(classifying(source, "x", "y", "z"))
        check(classifying(source, "no", "yes", model__new_head=True))
        check(bert_job(source))  # it has no such head
    check(classifying(tmp_path / "choices"))
    assert "has 1, this job 2" in refused(classifying(tmp_path / "choices", "no", "yes"))


def test_a_new_head_is_random_and_the_rest_the_trained_models(tmp_path: Path) -> None:
    theirs = saved(BertForSequenceClassification(BertConfig(**BERT, num_labels=2)), tmp_path)
    ours, new = (model_of(classifying(tmp_path, "no", "yes", model__new_head=one)) for one in (False, True))
    assert torch.equal(ours.classifier.weight, theirs.classifier.weight)
    assert not torch.equal(new.classifier.weight, theirs.classifier.weight)
    assert torch.equal(new.pooler.weight, theirs.bert.pooler.dense.weight)
    with pytest.raises(UserError, match=r"^model\.new_head: want a task that classifies, not 'masked_lm'"):
        bert_job(tmp_path, model__new_head=True)


def test_a_classifier_begins_with_a_bert_that_has_no_head(tmp_path: Path) -> None:
    theirs = saved(BertModel(BertConfig(**BERT)), tmp_path)
    config = classifying(tmp_path, "no", "yes")
    check(config)
    model = model_of(config)
    tokens_BS, mask_BS = token_rows()[0], torch.ones(3, TOKENS, dtype=torch.bool)
    expected = theirs(tokens_BS, attention_mask=mask_BS)
    hidden_BSD = model.hidden(tokens_BS, torch.zeros_like(tokens_BS), mask_BS)
    torch.testing.assert_close(hidden_BSD, expected.last_hidden_state, rtol=EXACT, atol=EXACT)
    pooled_BD = torch.tanh(model.pooler(hidden_BSD[:, 0]))
    torch.testing.assert_close(pooled_BD, expected.pooler_output, rtol=EXACT, atol=EXACT)


def test_a_model_that_ours_can_not_be_is_refused(tmp_path: Path) -> None:
    saved(GPT2LMHeadModel(GPT2Config(**GPT2, activation_function="relu")), tmp_path / "relu")
    assert "want activation_function of gelu_new" in refused(gpt_job(tmp_path / "relu"))
    llama = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    saved(LlamaForCausalLM(llama), tmp_path / "llama")
    assert "is of the type llama; want gpt2, bert, megatron-bert" in refused(gpt_job(tmp_path / "llama"))


def test_a_language_model_is_no_vit(tmp_path: Path) -> None:
    saved(GPT2LMHeadModel(GPT2Config(**GPT2)), tmp_path)
    with pytest.raises(UserError) as error:
        find_initial(str(tmp_path), "vit")
    assert str(error.value) == f"model.init_from: {tmp_path} is of the type gpt2; want a ViT of timm"


def test_a_vit_of_another_image_size_is_refused_by_the_key(tmp_path: Path) -> None:
    task = {"kind": "image_classification"}
    no_drop = {"method": "none"}
    trained(experiment(model=VIT, task=task, drop=no_drop), tmp_path)
    larger = {**VIT, "image_size": 24, "init_from": str(tmp_path)}
    said = refused(experiment(model=larger, task=task, drop=no_drop))
    assert said.startswith("model.image_size: ")
    assert said.endswith("has 12, this job 24; want 12")


def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused(gpt_job(tmp_path / "nothing")).startswith(f"model.init_from: {tmp_path / 'nothing'}: want a run")
    (tmp_path / CHECKPOINTS).mkdir()
    assert "want a run folder with a committed checkpoint" in refused(gpt_job(tmp_path))


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_folder_whose_weights_are_not_whole_is_refused(tmp_path: Path, damage: str) -> None:
    saved(GPT2LMHeadModel(GPT2Config(**GPT2)), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000]) if damage == "cut" else weights.unlink()
    with pytest.raises(UserError, match=rf"^model\.init_from: {tmp_path}: want the weights of a model, whole \("):
        model_of(gpt_job(tmp_path))


def test_parameters_that_a_family_does_not_know_are_missing(tmp_path: Path) -> None:
    saved(GPT2LMHeadModel(GPT2Config(**GPT2)), tmp_path / "gpt2")
    saved(BertForPreTraining(BertConfig(**BERT)), tmp_path / "bert")
    for name in ("gpt2", "bert"):
        names = ["extra.weight", "blocks.0.extra.weight", "blocks.0.scale", "tokens.weight"]
        weights = find_initial(str(tmp_path / name), "gpt").weights(names)
        assert [*weights] == ["tokens.weight"]


def test_an_architecture_that_is_unknown_here_is_read_by_its_type(tmp_path: Path) -> None:
    theirs = saved(GPT2LMHeadModel(GPT2Config(**GPT2)), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "architectures": ["MyForSequenceClassification"]}))
    found = find_initial(str(tmp_path), "bert").weights(["tokens.weight"])
    assert torch.equal(found["tokens.weight"], theirs.transformer.wte.weight)


def test_a_vocabulary_of_a_model_that_tells_cases_apart_is_no_tokenizer(tmp_path: Path) -> None:
    saved(BertModel(BertConfig(**BERT)), tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    for settings, expected in (({}, str(tmp_path / "vocab.txt")), ({"do_lower_case": False}, None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert find_initial(str(tmp_path), "bert").tokenizer == expected
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"^model\.init_from: .*/tokenizer_config\.json: want a JSON object"):
        _ = find_initial(str(tmp_path), "bert").tokenizer


def test_a_checkpoint_is_checked_as_it_is_read(tmp_path: Path) -> None:
    trained(experiment(), tmp_path)
    (checkpoint,) = committed(tmp_path / CHECKPOINTS)
    largest = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[::50] = bytes(len(content[::50]))
    largest.write_bytes(content)
    with pytest.raises(DamagedDataError):
        model_of(gpt_job(checkpoint))


def test_a_head_that_is_missing_is_named_unless_it_may_be_new(tmp_path: Path) -> None:
    theirs = saved(BertModel(BertConfig(**BERT)), tmp_path)
    config = bert_job(tmp_path)
    model = config.task.build(config).build_model(seed=3).double()
    with pytest.raises(UserError, match=r"model\.init_from: .* has no bias_V; want a model with the same heads"):
        begin_with(model, find_initial(str(tmp_path), "bert"), may_be_new=())
    head = model.transform.weight.clone()
    begin_with(model, find_initial(str(tmp_path), "bert"), may_be_new=("bias_V", "transform", "sentence."))
    assert torch.equal(model.transform.weight, head)
    assert torch.equal(model.pooler.weight, theirs.pooler.dense.weight)
