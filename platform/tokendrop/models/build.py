"""From a model's configuration to the model."""

import torch

from tokendrop.config.model import BertConfig, GptConfig
from tokendrop.errors import UserError
from tokendrop.models.gpt import Gpt


def check_trainable(config: GptConfig | BertConfig) -> GptConfig:
    """Raises UserError for a kind of model that can be planned but not trained yet."""
    if not isinstance(config, GptConfig):
        raise UserError(f"model.kind: '{config.kind}' can be planned but not trained yet; want 'gpt'")
    return config


def build_model(config: GptConfig | BertConfig, *, seed: int, activation_checkpointing: bool = False) -> Gpt:
    """A model with random weights, the same on every rank for one seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Gpt(check_trainable(config), activation_checkpointing=activation_checkpointing)
