"""What a model that drops tokens is called with, and how often on one draw."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from other_models import BATCH, HUGGING_FACE, LENGTH, MODELS, inputs, layers, real_tokens
from tiny import TOKENS, gpt, token_rows
from tokendrop.method import Dropping, Route, attach
from tokendrop.method.model_call import check_inputs

IDS = torch.arange(BATCH)
CACHED = [name for name in HUGGING_FACE if MODELS[name].causal]


def dropping(model: nn.Module, kept: int = 5, length: int = TOKENS) -> Dropping:
    dropping = attach(model, seed=1)
    dropping.draw(kept_length=kept, step=0, sample_ids=IDS, sequence_length=length)
    return dropping


def train(model: nn.Module, seed: int = 0) -> None:
    model(*token_rows(seed=seed)).backward()


def change_weights(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_other_samples_on_the_same_draw_are_told_once() -> None:
    model = gpt()
    dropping(model)
    train(model)
    with pytest.warns(UserWarning, match=r"the inputs are others than when draw\(\) was last called") as told:
        train(model, seed=1)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, seed=2)


def test_a_second_optimizer_step_on_the_same_draw_is_told() -> None:
    model = gpt()
    dropping(model)
    train(model)
    change_weights(model)
    with pytest.warns(UserWarning, match="the weights are others"):
        train(model)


def accumulate(model: nn.Module, _: Dropping) -> None:
    train(model)
    train(model)


def evaluate(model: nn.Module, _: Dropping) -> None:
    train(model)
    model.eval()(*token_rows(seed=1))
    with torch.no_grad():
        model.train()(*token_rows(seed=2))
    train(model)


def compute_all_again(model: nn.Module, _: Dropping) -> None:
    ids, labels = token_rows()
    scale = torch.ones((), requires_grad=True)  # reentrant checkpoints want an input with a gradient
    for reentrant in (False, True):
        checkpoint(lambda scale: model(ids, labels) * scale, scale, use_reentrant=reentrant).backward()


def draw_each_time(model: nn.Module, drops: Dropping) -> None:
    for step in range(3):
        drops.draw(kept_length=5, step=step, sample_ids=IDS, sequence_length=TOKENS)
        train(model, seed=step)
        change_weights(model)


def run_at_full_length(model: nn.Module, drops: Dropping) -> None:
    drops.draw(kept_length=TOKENS, step=0, sample_ids=IDS, sequence_length=TOKENS)
    train(model)
    train(model, seed=1)


@pytest.mark.parametrize("use", [accumulate, evaluate, compute_all_again, draw_each_time, run_at_full_length])
def test_what_may_share_a_draw_is_not_warned_of(use: Callable[[nn.Module, Dropping], None]) -> None:
    model = gpt()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(model, dropping(model))


def test_rows_that_begin_alike_are_told_apart() -> None:
    """As many samples as there are tokens, each with the same first token: a regular sample would see that alone."""
    model, begin = gpt(), torch.zeros(512, 1, dtype=torch.long)
    drops = attach(model, seed=1)
    drops.draw(kept_length=5, step=0, sample_ids=range(512), sequence_length=TOKENS)
    rows = [torch.cat([begin, torch.randint(50, (512, TOKENS - 1))], dim=1) for _ in range(2)]
    model(rows[0], rows[0])
    with pytest.warns(UserWarning, match="the inputs are others"):
        model(rows[1], rows[1])


@pytest.mark.parametrize(
    ("keys", "packed", "said"),
    [
        ({}, {"cu_seq_lens_q": torch.tensor([0, 3, 8])}, "cu_seq_lens: bounds of packed documents"),
        ({"_attn_implementation": "flash_attention_2", "sliding_window": 4}, {}, "a sliding window in kept tokens"),
        (
            {"_attn_implementation": "flash_attention_2"},
            {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
            "position_ids that begin again",
        ),
    ],
)
def test_what_flash_attention_tells_by_the_order_of_tokens_is_refused(
    keys: dict[str, object], packed: dict[str, Tensor], said: str
) -> None:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(**keys)
    ids = {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
    with pytest.raises(ValueError, match=said):
        check_inputs(model, ids | packed)


@pytest.mark.parametrize(
    ("kernel", "positions"), [("sdpa", [0, 1, 2, 0, 1, 2, 3, 4]), ("flash_attention_2", [0, 1, 2, 3, 4, 5, 6, 7])]
)
def test_packed_documents_go_with_masks_and_flash_attention_with_one_document(
    kernel: str, positions: list[int]
) -> None:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(_attn_implementation=kernel)
    check_inputs(model, {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "position_ids": torch.tensor([positions])})


def test_a_model_whose_weights_are_frozen_can_be_run() -> None:
    model = gpt().requires_grad_(False)
    dropping(model)
    model(*token_rows())
    with pytest.warns(UserWarning, match="the inputs are others"):
        model(*token_rows(seed=1))


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_is_refused_in_training_while_tokens_drop(name: str) -> None:
    model, batch = MODELS[name].model(), inputs(name)
    drops = dropping(model, length=LENGTH)
    with pytest.raises(ValueError, match=r"use_cache=True: .*; want use_cache=False"):
        model(**batch, use_cache=True)
    earlier = model.eval()(**batch, use_cache=True).past_key_values
    assert earlier.get_seq_length() == LENGTH
    with pytest.raises(ValueError, match="past_key_values: keys and values of earlier tokens are cached"):
        model.train()(**batch, past_key_values=earlier)
    drops.draw(kept_length=LENGTH, step=0, sample_ids=IDS, sequence_length=LENGTH)
    assert model(**batch, use_cache=True).past_key_values.get_seq_length() == LENGTH


@pytest.mark.parametrize("name", CACHED)
def test_the_cache_that_models_fill_unless_told_otherwise_stays_empty(name: str) -> None:
    """One with the tokens of the full length layers alone would look whole."""
    model, batch = MODELS[name].model(), inputs(name)
    dropping(model, length=LENGTH)
    cache = model(**batch).past_key_values
    assert cache is None or [cache.get_seq_length(layer) for layer in range(4)] == [0] * 4


def test_the_balance_of_experts_is_over_the_tokens_that_they_got() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model, batch = MODELS["mixtral"].model(), inputs("mixtral")
    drops = dropping(model, length=LENGTH)
    routed: list[Tensor] = []
    for layer in layers(model):
        layer.mlp.gate.register_forward_hook(lambda _, args, out: routed.append(out[0]))
    out = model(**batch, labels=batch["input_ids"], use_cache=False, output_router_logits=True)
    assert [len(logits) for logits in routed] == [BATCH * n for n in (LENGTH, 5, 5, LENGTH)]
    torch.testing.assert_close(out.aux_loss, load_balancing_loss_func(tuple(routed), 4, 2))
    assert drops.kept(1) is not None


@pytest.mark.parametrize("asked", ["argument", "configuration"])
def test_the_balance_of_experts_under_a_mask_is_refused(asked: str) -> None:
    model, batch = MODELS["mixtral"].model(), inputs("mixtral", "right")
    dropping(model, length=LENGTH)
    model.config.output_router_logits = asked == "configuration"
    more = {"output_router_logits": True} if asked == "argument" else {}
    with pytest.raises(ValueError, match=r"output_router_logits with an attention_mask: .*; want"):
        model(**batch, **more)
    model(**batch, output_router_logits=False)
    model.eval()(**batch, **more)
    assert not real_tokens("mixtral", batch).all()


class Layer(nn.Module):
    """Gives back what a test wants."""

    def __init__(self, gives: Callable[[Tensor], object] = lambda x: x) -> None:
        super().__init__()
        self.gives = gives

    def forward(self, hidden: Tensor, scale: float = 1.0) -> object:
        return self.gives(hidden)


class Nameless(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0]


@pytest.mark.parametrize(
    ("layer", "given", "said"),
    [
        (Layer(lambda x: {"hidden": x}), torch.zeros(BATCH, TOKENS, 4), "a Layer gave a dict; want hidden states"),
        (Layer(), torch.zeros(BATCH, TOKENS, 4, 4), r"layer 0 takes \(3, 16, 4, 4\); want hidden states"),
        (Layer(), [torch.zeros(BATCH, TOKENS, 4)], "layer 0 takes a list; want hidden states"),
        (Nameless(), torch.zeros(BATCH, TOKENS, 4), "Nameless.forward has inputs without names"),
    ],
)
def test_layers_of_another_kind_are_refused(layer: nn.Module, given: object, said: str) -> None:
    model = nn.ModuleList([layer])
    drops = attach(model, seed=1, routes=[Route(first=0, last=0)], blocks=[layer])
    drops.draw(kept_length=5, step=0, sample_ids=IDS, sequence_length=TOKENS)
    with pytest.raises(ValueError, match=said):
        layer(given)
