"""Our GPT, against Hugging Face's and against torch's own counting."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tiny import BATCH, TOKENS, gpt, gpt_config, token_rows
from tokendrop.config.model import GptConfig
from tokendrop.method import attach
from tokendrop.models.build import build_model
from tokendrop.models.gpt import Gpt, rotary_angles, rotate

CLOSE = 1e-5  # float32
EXACT = 1e-12  # float64


def as_gpt2(model: Gpt) -> nn.Module:
    """Hugging Face's GPT-2 with the weights of ours; its Conv1D is a transposed Linear."""
    transformers = pytest.importorskip("transformers")
    config = model.config
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=config.layers,
            n_embd=config.width,
            n_head=config.heads,
            n_positions=config.sequence_length,
            vocab_size=config.vocab_size,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    names = {"norm_1": "ln_1", "norm_2": "ln_2", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
    names |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "blocks": "h", "norm": "ln_f"}
    names |= {"tokens": "wte", "positions": "wpe"}
    state = {}
    for key, value in model.state_dict().items():
        is_linear = key.endswith("weight") and (".attention." in key or ".mlp." in key)
        for ours, hf in names.items():
            key = f".{key}".replace(f".{ours}.", f".{hf}.")[1:]
        state[f"transformer.{key}"] = value.T if is_linear else value
    theirs.load_state_dict(state | {"lm_head.weight": model.tokens.weight}, strict=True)
    return theirs.eval()


@given(seed=st.integers(0, 1000), tokens=st.integers(2, TOKENS))
@settings(max_examples=10)
def test_logits_and_loss_are_those_of_gpt2(seed: int, tokens: int) -> None:
    model = gpt(dtype=torch.float32).eval()
    theirs = as_gpt2(model)
    ids = token_rows(seed=seed)[0][:, :tokens]

    expected = theirs(ids, labels=ids)

    torch.testing.assert_close(model.logits(ids), expected.logits, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(model(ids[:, :-1], ids[:, 1:]), expected.loss, rtol=CLOSE, atol=CLOSE)


@given(tokens=st.integers(1, 70), width=st.integers(1, 16).map(lambda half: 2 * half), seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_rotary_positions_are_those_of_llama(tokens: int, width: int, seed: int) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 3, 2, tokens, width, generator=generator)
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=2 * width, num_attention_heads=2, head_dim=width, max_position_embeddings=128
    )
    position_ids = torch.arange(tokens)[None]
    expected = llama.apply_rotary_pos_emb(q, k, *llama.LlamaRotaryEmbedding(config)(q, position_ids))

    rotary = rotary_angles(tokens, width, q)

    for ours, theirs in zip((rotate(q, rotary), rotate(k, rotary)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=CLOSE, atol=CLOSE)


def test_rotary_attention_depends_on_distances_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, TOKENS, 8)
    rotary = rotary_angles(TOKENS, 8, q)
    scores = (rotate(q, rotary) @ rotate(k, rotary).mT)[0, 0]
    for distance in range(1, TOKENS):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_token_does_not_see_the_tokens_after_it(positions: str) -> None:
    model = gpt(positions=positions).eval()
    ids = token_rows()[0]
    for cut in (1, 7, TOKENS - 1):
        torch.testing.assert_close(model.logits(ids[:, :cut]), model.logits(ids)[:, :cut], rtol=EXACT, atol=EXACT)


def test_a_sequence_longer_than_the_models_is_refused() -> None:
    too_long = torch.zeros(1, TOKENS + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"want at most {TOKENS} tokens"):
        gpt()(too_long, too_long)


@pytest.mark.parametrize("kept", [5, TOKENS])
def test_the_plans_flops_are_those_that_torch_counts(kept: int) -> None:
    """Torch counts every pair of tokens in causal attention, so it is compared with a shape that attends to all."""
    model = gpt(dtype=torch.float32)
    attach(model, seed=1).draw(kept_length=kept, step=0, sample_ids=torch.arange(BATCH), sequence_length=TOKENS)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        model(*token_rows()).backward()
    shape = replace(model.config.shape, causal=False)
    assert counted.get_total_flops() == BATCH * shape.flops(kept=kept, dropped_layers=2)


def test_validation_spends_no_flops_on_gradients() -> None:
    model = gpt(dtype=torch.float32).eval()
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(*token_rows())
    shape = replace(model.config.shape, causal=False)
    assert 3 * counted.get_total_flops() == BATCH * shape.flops(kept=TOKENS, dropped_layers=0)


# millions of parameters that a preset's name states; small ones with a small vocabulary, the others with GPT-2's
STATED = {"gpt-1m": 1, "gpt-5m": 5, "gpt-10m": 10, "gpt-30m": 30} | {
    "gpt2-124m": 124,
    "gpt2-355m": 355,
    "gpt3-125m": 125,
    "gpt3-350m": 350,
    "gpt3-760m": 760,
    "gpt3-1.3b": 1300,
}


@pytest.mark.parametrize("preset", GptConfig.PRESETS)
def test_a_preset_has_about_as_many_parameters_as_its_name_says(preset: str) -> None:
    config = GptConfig(
        **GptConfig.PRESETS[preset],
        vocab_size=1024 if STATED[preset] < 100 else 50304,  # pyright: ignore
    )
    with torch.device("meta"):
        model = Gpt(config)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions == pytest.approx(STATED[preset], rel=0.15)


def test_weights_start_as_gpt2s_do() -> None:
    """Five deviations of an estimate of a standard deviation, sigma / sqrt(2 n), around 0.02 and 0.02 / sqrt(2 L)."""
    config = gpt_config(layers=8, width=64, heads=4)
    into_residual = 0.02 / (2 * 8) ** 0.5
    for name, parameter in build_model(config, seed=3).state_dict().items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            std = into_residual if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
            assert float(parameter.std()) == pytest.approx(std, rel=5 / (2 * parameter.numel()) ** 0.5), name
            assert abs(float(parameter.mean())) < 5 * std / parameter.numel() ** 0.5, name


def test_a_model_is_a_function_of_its_seed_and_leaves_torchs_seed_alone() -> None:
    def weights(seed: int) -> list[Tensor]:
        return list(build_model(gpt_config(), seed=seed).state_dict().values())

    before = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(weights(1), weights(1), strict=True))
    assert not torch.equal(weights(1)[0], weights(2)[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_off_in_evaluation() -> None:
    model, rows = gpt(dropout=0.5), token_rows()
    assert not torch.equal(model(*rows), model(*rows))
    assert torch.equal(model.eval()(*rows), gpt().eval()(*rows))
