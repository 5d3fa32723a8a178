"""Drops on Hugging Face's models: a dropped layer is the layer with dropped keys masked and dropped tokens passed by.

The oracle gathers nothing. It runs the plain model over all tokens, hands each dropped layer a mask that hides the
dropped keys, and puts the layer's input back in the dropped tokens' places.
"""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tiny import assert_same, gradients
from tokendrop.method import Dropping, attach

transformers = pytest.importorskip("transformers")

EXACT = 1e-12  # float64; the order of additions may differ
IN_FLOAT32 = 1e-4  # transformers' eager attention of Llama takes its softmax in float32, whatever the model is in
BATCH, TOKENS, KEPT, VOCAB = 3, 12, 5, 40
IDS = torch.arange(BATCH) + 7


def gpt2(attention: str) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=16, n_head=2, n_positions=TOKENS, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return build(transformers.GPT2LMHeadModel, config, attention)


def llama(attention: str) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=TOKENS,
    )
    return build(transformers.LlamaForCausalLM, config, attention)


def bert(attention: str) -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=4,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return build(transformers.BertForMaskedLM, config, attention)


def build(kind: Callable[..., nn.Module], config: object, attention: str) -> nn.Module:
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).double().train()
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower() and "ln_" not in name:
                nn.init.normal_(parameter, std=0.2)
    return model


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert}


def layers(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 4)


def inputs(padded: bool) -> dict[str, Tensor]:
    """Rows whose ends are padding, where asked; padding is no target."""
    ids = torch.randint(1, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2))
    if not padded:
        return {"input_ids": ids, "labels": ids}
    mask = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [TOKENS - 3], [TOKENS - 6]])).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def drop(model: nn.Module, kept: int = KEPT) -> Dropping:
    dropping = attach(model, seed=3)
    dropping.draw(kept_length=kept, step=1, sample_ids=IDS, sequence_length=TOKENS)
    return dropping


def mask_dropped_keys(model: nn.Module, dropping: Dropping, *, causal: bool, real_BS: Tensor) -> None:
    """Make the plain `model` compute what it should with these drops, without dropping anything."""
    for number in dropping.layers:
        kept_BS = torch.zeros(BATCH, TOKENS, dtype=torch.bool).scatter(1, dropping.kept(number), True)
        seen = (kept_BS & real_BS)[:, None, None, :].expand(BATCH, 1, TOKENS, TOKENS)
        if causal:
            seen = seen & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float32).min)
        layer = layers(model)[number]
        names = list(inspect.signature(layer.forward).parameters)

        def with_mask(layer, args, kwargs, mask=mask, names=names):
            named = dict(zip(names, args, strict=False)) | kwargs | {"attention_mask": mask}
            return (named.pop(names[0]),), named

        def past_the_layer(layer, args, kwargs, out, kept_BS=kept_BS):
            return torch.where(kept_BS[..., None], out, args[0])

        layer.register_forward_pre_hook(with_mask, with_kwargs=True)
        layer.register_forward_hook(past_the_layer, with_kwargs=True)


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_dropping_is_masking_and_passing_by(name: str, attention: str, padded: bool) -> None:
    dropped, oracle = MODELS[name](attention), MODELS[name](attention)
    batch = inputs(padded)
    real_BS = batch.get("attention_mask", torch.ones(BATCH, TOKENS)).bool()
    mask_dropped_keys(oracle, drop(dropped), causal=name != "bert", real_BS=real_BS)

    ours, theirs = dropped(**batch), oracle(**batch)

    tolerance = IN_FLOAT32 if (name, attention) == ("llama", "eager") else EXACT
    torch.testing.assert_close(ours.logits[real_BS], theirs.logits[real_BS], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=tolerance, atol=tolerance)
    assert_same(gradients(dropped, ours.loss), gradients(oracle, theirs.loss), tolerance=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_drops_change_the_loss_in_training_and_never_in_evaluation(name: str) -> None:
    plain, dropped = MODELS[name]("sdpa"), MODELS[name]("sdpa")
    drop(dropped)
    batch = inputs(padded=False)
    assert not torch.equal(dropped(**batch).loss, plain(**batch).loss)
    assert torch.equal(dropped.eval()(**batch).logits, plain.eval()(**batch).logits)


@pytest.mark.parametrize("name", MODELS)
def test_at_full_length_the_model_is_the_plain_one_bit_for_bit(name: str) -> None:
    plain, dropped = MODELS[name]("sdpa"), MODELS[name]("sdpa")
    drop(dropped, kept=TOKENS)
    batch = inputs(padded=True)
    loss, expected = dropped(**batch).loss, plain(**batch).loss
    assert torch.equal(loss, expected)
    assert_same(gradients(dropped, loss), gradients(plain, expected))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_gives_the_same_gradients(name: str, reentrant: bool) -> None:
    batch, found, calls = inputs(padded=True), [], []
    for recompute in (False, True):
        model = MODELS[name]("sdpa")
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()  # reentrant checkpoints want it
        dropping = drop(model)
        part = next(layers(model)[1].children())
        part.register_forward_pre_hook(lambda *_, recompute=recompute: calls.append(recompute))
        loss = model(**batch).loss
        dropping.draw(kept_length=3, step=2, sample_ids=IDS, sequence_length=TOKENS)
        found.append(gradients(model, loss))
    assert_same(*found, tolerance=EXACT)
    assert calls == [False, True, True]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_sample_of_almost_only_padding_trains_to_finite_numbers(name: str, attention: str) -> None:
    """Its one real token is dropped by most layers, so its padding attends to nothing at all."""
    model = MODELS[name](attention).float()
    drop(model, kept=2)
    batch = inputs(padded=False)
    batch["attention_mask"] = torch.ones(BATCH, TOKENS, dtype=torch.long)
    batch["attention_mask"][1, 1:] = 0
    loss = model(**batch).loss
    assert torch.isfinite(loss)
    assert all(bool(torch.isfinite(grad).all()) for grad in gradients(model, loss).values())


@pytest.mark.parametrize("name", MODELS)
def test_names_and_classes_are_those_of_the_plain_model_again_after_detach(name: str) -> None:
    from tokendrop.method import detach

    plain, model = MODELS[name]("sdpa"), MODELS[name]("sdpa")
    drop(model)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    detach(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
