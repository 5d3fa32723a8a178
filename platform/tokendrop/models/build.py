"""From a model's configuration to the model, with random weights that are the same on every rank for one seed."""

import torch

from tokendrop.config.model import BertConfig, GptConfig, VitConfig
from tokendrop.models.bert import Bert, BertClassifier
from tokendrop.models.gpt import Gpt
from tokendrop.models.vit import Vit


def build_model(config: GptConfig, *, seed: int) -> Gpt:
    """A GPT."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Gpt(config)


def build_classifier(config: BertConfig, *, outputs: int, seed: int) -> BertClassifier:
    """A BERT that classifies; arguments as of `BertClassifier`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertClassifier(config, outputs=outputs)


def build_bert(config: BertConfig, *, sentence_head: bool, most_labels: int, seed: int) -> Bert:
    """A BERT; arguments as of `Bert`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Bert(config, sentence_head=sentence_head, most_labels=most_labels)


def build_vit(config: VitConfig, *, seed: int) -> Vit:
    """A ViT."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Vit(config)
