"""A job begins with the weights of another model: Hugging Face's, exactly, or those of a checkpoint of ours."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tiny import TOKENS, assert_same, experiment, token_rows
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.errors import UserError
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
    model = {**BERT_JOB, "init_from": str(init_from)}
    return experiment(**{"model": model, "task": {"kind": "masked_lm"}, **changes})


def model_of(config: ExperimentConfig) -> Any:
    return build_engine(config, CPU)[0].model.eval()


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
        engine, _ = build_engine(config, CPU, begins=False)
        assert not torch.equal(engine.model.tokens.weight, weights["tokens.weight"])


def refused(config: ExperimentConfig) -> str:
    with pytest.raises(UserError) as error:
        check_sizes(config.model, find_initial(config.model.init_from or ""))
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


def test_a_model_that_ours_can_not_be_is_refused(tmp_path: Path) -> None:
    saved(GPT2LMHeadModel(GPT2Config(**GPT2, activation_function="relu")), tmp_path / "relu")
    assert "want activation_function of gelu_new" in refused(gpt_job(tmp_path / "relu"))
    llama = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    saved(LlamaForCausalLM(llama), tmp_path / "llama")
    assert "is of the type llama; want gpt2, bert, megatron-bert" in refused(gpt_job(tmp_path / "llama"))


def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused(gpt_job(tmp_path / "nothing")).startswith(f"model.init_from: {tmp_path / 'nothing'}: want a run")
    (tmp_path / CHECKPOINTS).mkdir()
    assert "want a run folder with a committed checkpoint" in refused(gpt_job(tmp_path))


def test_a_head_that_is_missing_is_named_unless_it_may_be_new(tmp_path: Path) -> None:
    theirs = saved(BertModel(BertConfig(**BERT)), tmp_path)
    config = bert_job(tmp_path)
    model = config.task.build(config).build_model(seed=3).double()
    with pytest.raises(UserError, match=r"model\.init_from: .* has no bias_V; want a model with the same heads"):
        begin_with(model, find_initial(str(tmp_path)), may_be_new=())
    head = model.transform.weight.clone()
    begin_with(model, find_initial(str(tmp_path)), may_be_new=("bias_V", "transform", "sentence."))
    assert torch.equal(model.transform.weight, head)
    assert torch.equal(model.pooler.weight, theirs.pooler.dense.weight)
