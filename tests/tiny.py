"""Models small enough to test in milliseconds."""

import torch
from torch import Tensor

from tokendrop.config.model import GptConfig
from tokendrop.models.gpt import Gpt

SEED = 1234
TOKENS, BATCH = 16, 3


def gpt_config(**changes: object) -> GptConfig:
    sizes = {"layers": 4, "width": 16, "heads": 2, "sequence_length": TOKENS, "vocab_size": 50}
    return GptConfig(**{**sizes, **changes})  # pyright: ignore[reportArgumentType]


def gpt(*, dtype: torch.dtype = torch.float64, recompute: bool = False, **changes: object) -> Gpt:
    """A model with random weights, large enough that layers matter; the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = Gpt(gpt_config(**changes), activation_checkpointing=recompute).to(dtype)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def token_rows(batch: int = BATCH, *, seed: int = SEED, vocab_size: int = 50) -> tuple[Tensor, Tensor]:
    """Input ids and labels, (B, S) each."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(vocab_size, (batch, TOKENS + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of `loss` by parameter name; the model keeps none."""
    model.zero_grad()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], *, tolerance: float = 0.0) -> None:
    """Equal keys and values; without a tolerance bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
