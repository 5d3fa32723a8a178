"""BERT: embed -> layers -> heads, for masked tokens and pairs of sentences or for labelled examples -> loss."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokendrop.config.model import BertConfig
from tokendrop.models.attention import masked_attention
from tokendrop.models.batch import BertBatch, ExampleBatch
from tokendrop.models.layer import Layer, TokenGroup
from tokendrop.models.loss import HeadLoss, head_loss

# Dimensions: B micro batch, S tokens (kept ones in a dropped layer), D width, H heads, W head width, V vocabulary,
# M most labels of a sequence, C choices of an example, O outputs of a head.

_EPS = 1e-12


class Attention(nn.Module):
    """Self-attention among the tokens it is given, padding left out."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.head_width = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BSD: Tensor, mask_B11S: Tensor, group: TokenGroup | None = None) -> Tensor:
        batch, tokens, _ = x_BSD.shape
        q_BHSW, k_BHSW, v_BHSW = (
            part.view(batch, tokens, self.heads, self.head_width).transpose(1, 2)
            for part in self.qkv(x_BSD).chunk(3, dim=2)
        )
        if group is not None:
            everything = mask_B11S.shape[3]
            k_BHSW, v_BHSW = (group.whole(part, dim=2)[:, :, :everything] for part in (k_BHSW, v_BHSW))
        dropout = self.dropout if self.training else 0.0
        out_BHSW = masked_attention(q_BHSW, k_BHSW, v_BHSW, mask_B11S, dropout=dropout)
        return self.out(out_BHSW.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two matrix products with a GELU between them."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BSD)))


class Block(Layer):
    """One layer: attention, then MLP, each added to its input; normalized after that (BERT) or before (Megatron-LM)."""

    shares_tokens = True

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention, self.norm_1 = Attention(config), nn.LayerNorm(config.width, _EPS)
        self.mlp, self.norm_2 = Mlp(config), nn.LayerNorm(config.width, _EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.normalizes_first = config.norm == "pre"

    def forward(self, x_BSD: Tensor, attention_mask: Tensor) -> Tensor:
        """
        Args:
            attention_mask: bool (B, 1, 1, S), False for padding.
        """
        group = self.token_group
        if group is None:
            return self._run(x_BSD, attention_mask)
        return group.whole(self._run(group.own(x_BSD), attention_mask), dim=1)[:, : x_BSD.shape[1]]

    def _run(self, x_BSD: Tensor, mask_B11S: Tensor) -> Tensor:
        if self.training and self.recompute:
            return checkpoint(self._compute, x_BSD, mask_B11S, use_reentrant=False)
        return self._compute(x_BSD, mask_B11S)

    def _compute(self, x_BSD: Tensor, mask_B11S: Tensor) -> Tensor:
        group = self.token_group
        if self.normalizes_first:
            x_BSD = x_BSD + self.dropout(self.attention(self.norm_1(x_BSD), mask_B11S, group))
            return x_BSD + self.dropout(self.mlp(self.norm_2(x_BSD)))
        x_BSD = self.norm_1(x_BSD + self.dropout(self.attention(x_BSD, mask_B11S, group)))
        return self.norm_2(x_BSD + self.dropout(self.mlp(x_BSD)))


class BertEncoder(nn.Module):
    """Embeddings and layers, to which a model adds its heads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.types = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width, _EPS)
        """Of the embeddings, or where layers normalize first of the last layer's output."""
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))

    def hidden(self, input_ids_BS: Tensor, token_types_BS: Tensor, attention_mask_BS: Tensor) -> Tensor:
        """Hidden states of the last layer, (B, S, D).

        Raises:
            ValueError: the sequence is longer than the model's.
        """
        tokens = input_ids_BS.shape[1]
        if tokens > self.config.sequence_length:
            raise ValueError(f"want at most {self.config.sequence_length} tokens, got {tokens}")
        x_BSD = self.tokens(input_ids_BS) + self.types(token_types_BS) + self.positions.weight[:tokens]
        normalizes_first = self.config.norm == "pre"
        x_BSD = self.dropout(x_BSD if normalizes_first else self.norm(x_BSD))
        mask_B11S = attention_mask_BS[:, None, None]
        for block in self.blocks:
            x_BSD = block(x_BSD, mask_B11S)
        return self.norm(x_BSD) if normalizes_first else x_BSD

    def _initialize(self) -> None:
        """BERT's: normal(0.02); where layers normalize first, projections into the residual stream as GPT's."""
        scale = math.sqrt(2 * self.config.layers) if self.config.norm == "pre" else 1.0
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name and name != "bias_V":
                into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / scale if into_residual else 0.02)


class BertLoss(NamedTuple):
    """What a forward pass came to."""

    mean: Tensor
    """What is minimised: the mean over the masked tokens, plus that over the pairs of sentences."""
    token_losses_BS: Tensor
    """That of each masked token, nats, 0 elsewhere; detached."""
    masked_tokens: Tensor
    """How many there are."""
    token_hits: Tensor
    """How many of them are most likely; 0 where gradients are wanted."""
    sentence_hits: Tensor | None
    """In how many pairs the label is the more likely one; None without such a head."""


class Bert(BertEncoder):
    """A BERT whose head for masked tokens is tied to its token embedding."""

    HANDS_ON_ONCE = True

    def __init__(self, config: BertConfig, *, sentence_head: bool, most_labels: int) -> None:
        """
        Args:
            sentence_head: whether it tells right pairs of sentences from wrong ones.
            most_labels: masked tokens of a sequence, at most.
        """
        super().__init__(config)
        self.most_labels, width = most_labels, config.width
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width, _EPS)
        self.bias_V = nn.Parameter(torch.zeros(config.vocab_size))
        self.pooler = nn.Linear(width, width) if sentence_head else None
        self.sentence = nn.Linear(width, 2) if sentence_head else None
        self._initialize()

    def forward(self, batch: BertBatch) -> BertLoss:
        hidden_BSD = self.hidden(batch.input_ids_BS, batch.token_types_BS, batch.attention_mask_BS)
        is_label_BS = batch.labels_BS >= 0
        # labels first, in their order: a fixed number of places, for to count them would wait for the device
        places_BM = (~is_label_BS).to(torch.uint8).argsort(dim=1, stable=True)[:, : self.most_labels]
        labels_BM = batch.labels_BS.gather(1, places_BM)
        count = is_label_BS.sum()
        divisor = count.clamp(min=1) if batch.labels_per_sample is None else batch.labels_per_sample * len(labels_BM)
        chosen_BMD = hidden_BSD.take_along_dim(places_BM[:, :, None], 1)
        masked = self.token_loss(chosen_BMD, labels_BM, divisor)
        token_losses_BS = torch.zeros_like(is_label_BS, dtype=masked.losses_N.dtype)
        token_losses_BS = token_losses_BS.scatter(1, places_BM, masked.losses_N)
        token_hits = masked.hits_N.sum() if len(masked.hits_N) else torch.zeros_like(count)
        loss, hits = masked.loss, None
        if self.sentence is not None:
            logits_B2 = self.sentence_logits(hidden_BSD).to(loss.dtype)
            loss = loss + F.cross_entropy(logits_B2, batch.sentence_labels_B)
            hits = (logits_B2.argmax(1) == batch.sentence_labels_B).sum()
        return BertLoss(loss, token_losses_BS, count, token_hits, hits)

    def token_logits(self, hidden_BSD: Tensor) -> Tensor:
        """Logits of the token in each place, (B, S, V)."""
        return self._transformed(hidden_BSD) @ self.tokens.weight.T + self.bias_V

    def token_loss(self, hidden_BMD: Tensor, labels_BM: Tensor, divisor: Tensor) -> HeadLoss:
        """Cross entropy of `token_logits`, of the labels of at least 0: their sum by a divisor."""
        transformed = self._transformed(hidden_BMD)
        return head_loss(transformed, self.tokens.weight, labels_BM, bias_V=self.bias_V, divisor=divisor)

    def sentence_logits(self, hidden_BSD: Tensor) -> Tensor:
        """Logits of a right and a wrong pair of sentences, (B, 2)."""
        assert self.pooler is not None
        assert self.sentence is not None
        return self.sentence(torch.tanh(self.pooler(hidden_BSD[:, 0])))

    def _transformed(self, hidden: Tensor) -> Tensor:
        return self.transform_norm(F.gelu(self.transform(hidden)))


class ClassifierLoss(NamedTuple):
    """What a forward pass came to."""

    mean: Tensor
    """What is minimised: cross entropy, nats, or of numbers the squared error; the mean over the examples."""
    outputs_BO: Tensor
    """Logits of an example's labels or choices, or its number."""


class BertClassifier(BertEncoder):
    """A BERT with a head for examples: it gives each a label or a number, or chooses one of several sequences."""

    HANDS_ON_ONCE = True

    def __init__(self, config: BertConfig, *, outputs: int) -> None:
        """
        Args:
            outputs: labels; 1 where sequences are to be chosen from, or a number is wanted.
        """
        super().__init__(config)
        self.pooler, self.classifier = nn.Linear(config.width, config.width), nn.Linear(config.width, outputs)
        self._initialize()

    def forward(self, batch: ExampleBatch) -> ClassifierLoss:
        outputs_BO = self.outputs(batch.input_ids_BCS, batch.token_types_BCS, batch.attention_mask_BCS)
        outputs_BO = outputs_BO.to(torch.promote_types(outputs_BO.dtype, torch.float32))
        if batch.labels_B.is_floating_point():
            mean = F.mse_loss(outputs_BO[:, 0], batch.labels_B.to(outputs_BO.dtype))
        else:
            mean = F.cross_entropy(outputs_BO, batch.labels_B)
        return ClassifierLoss(mean, outputs_BO)

    def outputs(self, input_ids_BCS: Tensor, token_types_BCS: Tensor, attention_mask_BCS: Tensor) -> Tensor:
        """(B, outputs), or where there are choices (B, C)."""
        inputs = (one.flatten(0, 1) for one in (input_ids_BCS, token_types_BCS, attention_mask_BCS))
        pooled = torch.tanh(self.pooler(self.hidden(*inputs)[:, 0]))
        return self.classifier(self.dropout(pooled)).view(len(input_ids_BCS), -1)
