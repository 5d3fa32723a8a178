"""Our BERT, against Hugging Face's with the same weights."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny import assert_same, gradients
from tokendrop.config.model import BertConfig
from tokendrop.data.read.mask_tokens import IGNORED
from tokendrop.models.batch import BertBatch
from tokendrop.models.bert import Bert
from tokendrop.models.build import build_bert
from tokendrop.models.pretrained_bert import as_bert, bert_weights, weights_of

EXACT = 1e-10  # float64
VOCAB, LENGTH, PAD = 50, 24, 0
KINDS = [(norm, head) for norm in ("post", "pre") for head in (True, False)]


def bert(norm: str = "post", *, sentence_head: bool = True, seed: int = 1, most_labels: int = LENGTH) -> Bert:
    """A model with random weights, large enough that layers matter, biases and norms too."""
    config = BertConfig(layers=2, width=16, heads=2, sequence_length=LENGTH, vocab_size=VOCAB, norm=norm)  # pyright: ignore[reportArgumentType]
    model = build_bert(config, sentence_head=sentence_head, most_labels=most_labels, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


@st.composite
def batches(draw: st.DrawFn) -> BertBatch:
    """Sequences of any length from 5 tokens on, with padding and some labels each."""
    size, length = draw(st.integers(1, 4)), draw(st.integers(5, LENGTH))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    ids_BS = torch.randint(1, VOCAB, (size, length), generator=generator)
    real_BS = torch.arange(length) < torch.randint(5, length + 1, (size, 1), generator=generator)
    is_label_BS = (torch.rand(size, length, generator=generator) < 0.2) & real_BS
    is_label_BS[:, 1] = True
    return BertBatch(
        input_ids_BS=ids_BS.where(real_BS, PAD),
        labels_BS=torch.where(is_label_BS, torch.randint(VOCAB, (size, length), generator=generator), IGNORED),
        token_types_BS=torch.randint(2, (size, length), generator=generator),
        attention_mask_BS=real_BS,
        sentence_labels_B=torch.randint(2, (size,), generator=generator),
        sample_ids_B=torch.arange(size),
    )


def asked(batch: BertBatch, *, sentence_head: bool) -> dict[str, torch.Tensor]:
    """The batch by the names of Hugging Face's models."""
    inputs = {
        "input_ids": batch.input_ids_BS,
        "token_type_ids": batch.token_types_BS,
        "attention_mask": batch.attention_mask_BS.long(),
        "labels": batch.labels_BS,
    }
    return inputs | ({"next_sentence_label": batch.sentence_labels_B} if sentence_head else {})


def read_bert(model: Bert, theirs: dict[str, torch.Tensor]) -> None:
    """Put what lies under the names of Hugging Face's model into ours."""
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict(weights_of(theirs, as_bert(model, PAD).config, names))


@pytest.mark.parametrize(("norm", "sentence_head"), KINDS)
@given(batch=batches())
def test_logits_loss_and_gradients_are_those_of_hugging_faces(norm: str, sentence_head: bool, batch: BertBatch) -> None:
    model = bert(norm, sentence_head=sentence_head)
    theirs = as_bert(model, PAD)
    loss, expected = model(batch), theirs(**asked(batch, sentence_head=sentence_head))
    torch.testing.assert_close(loss.mean, expected.loss, rtol=EXACT, atol=EXACT)
    hidden = model.hidden(batch.input_ids_BS, batch.token_types_BS, batch.attention_mask_BS)
    logits = expected.prediction_logits if sentence_head else expected.logits
    torch.testing.assert_close(model.token_logits(hidden), logits, rtol=EXACT, atol=EXACT)
    if sentence_head:
        sentence = expected.seq_relationship_logits
        torch.testing.assert_close(model.sentence_logits(hidden), sentence, rtol=EXACT, atol=EXACT)
    ours, others = gradients(model, loss.mean), gradients(theirs, expected.loss)
    for found in (ours["tokens.weight"], others["bert.embeddings.word_embeddings.weight"]):
        found[PAD] = 0  # which theirs never trains as an input
    again = bert(norm, sentence_head=sentence_head)
    read_bert(again, others)
    assert_same(dict(again.named_parameters()), ours, tolerance=1e-9)


@pytest.mark.parametrize(("norm", "sentence_head"), KINDS)
def test_weights_go_out_and_come_back(norm: str, sentence_head: bool) -> None:
    model, other = bert(norm, sentence_head=sentence_head), bert(norm, sentence_head=sentence_head, seed=2)
    read_bert(other, as_bert(model, PAD).state_dict())
    assert_same(dict(other.named_parameters()), dict(model.named_parameters()))
    assert bert_weights(model).keys() <= as_bert(model, PAD).state_dict().keys()


@given(batch=batches())
def test_fewer_places_for_labels_are_enough_where_no_sequence_has_more(batch: BertBatch) -> None:
    most = int((batch.labels_BS >= 0).sum(1).max())
    few, many = bert(most_labels=most)(batch), bert()(batch)
    torch.testing.assert_close(few.mean, many.mean, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(few.token_losses_BS, many.token_losses_BS, rtol=EXACT, atol=EXACT)


@given(batch=batches())
def test_the_loss_of_a_batch_is_the_mean_of_its_parts_however_labels_are_spread(batch: BertBatch) -> None:
    model, size = bert(), len(batch.sample_ids_B)
    per_sample = batch.labels().double() / size
    parts = [
        BertBatch(**{name: value[n : n + 1] for name, value in batch.inputs().items()}, sample_ids_B=torch.tensor([n]))  # pyright: ignore[reportArgumentType]
        for n in range(size)
    ]
    losses = torch.stack([model(part.weighed(per_sample)).mean for part in parts])
    torch.testing.assert_close(losses.mean(), model(batch).mean, rtol=EXACT, atol=EXACT)


@torch.no_grad()
@given(batch=batches())
def test_hits_are_the_labels_that_are_most_likely(batch: BertBatch) -> None:
    model = bert().eval()
    hidden = model.hidden(batch.input_ids_BS, batch.token_types_BS, batch.attention_mask_BS)
    hits_BS = (model.token_logits(hidden).argmax(-1) == batch.labels_BS) & (batch.labels_BS >= 0)
    likely_B = model.sentence_logits(hidden).argmax(-1) == batch.sentence_labels_B
    loss = model(batch)
    assert (int(loss.masked_tokens), int(loss.token_hits)) == (int(batch.labels()), int(hits_BS.sum()))
    assert int(loss.sentence_hits) == int(likely_B.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_to_nothing_but_padding_is_a_number(dtype: torch.dtype) -> None:
    """A layer that drops tokens may keep padding alone."""
    model = bert().float()
    hidden_BSD, nothing_B11S = torch.randn(2, 4, 16), torch.zeros(2, 1, 1, 4, dtype=torch.bool)
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        assert model.blocks[0](hidden_BSD, nothing_B11S).isfinite().all()


@given(batch=batches(), padding=st.integers(1, 5))
def test_padding_changes_nothing(batch: BertBatch, padding: int) -> None:
    model, kept = bert(), LENGTH - padding
    batch = batch.cut(kept)

    def padded(value: torch.Tensor, filler: float) -> torch.Tensor:
        return torch.nn.functional.pad(value, (0, padding), value=filler)

    longer = replace(
        batch,
        input_ids_BS=padded(batch.input_ids_BS, PAD),
        labels_BS=padded(batch.labels_BS, IGNORED),
        token_types_BS=padded(batch.token_types_BS, 0),
        attention_mask_BS=padded(batch.attention_mask_BS, False),
    )
    torch.testing.assert_close(model(longer).mean, model(batch).mean, rtol=EXACT, atol=EXACT)
