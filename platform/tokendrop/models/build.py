"""From a model's configuration to the model."""

import torch

from tokendrop.config.model import GptConfig
from tokendrop.models.gpt import Gpt


def build_model(config: GptConfig, *, seed: int, activation_checkpointing: bool = False) -> Gpt:
    """A model with random weights, the same on every rank for one seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Gpt(config, activation_checkpointing=activation_checkpointing)
