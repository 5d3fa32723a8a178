"""A BERT with a head for examples, against Hugging Face's on the same weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForMultipleChoice, AutoModelForSequenceClassification

from tiny import gradients
from tokendrop.config.model import BertConfig
from tokendrop.models.batch import ExampleBatch
from tokendrop.models.bert import BertClassifier
from tokendrop.models.build import build_classifier
from tokendrop.models.hugging_face import HuggingFaceWeights
from tokendrop.models.pretrained_bert import as_classifier
from tokendrop.train.initial import begin_with

EXACT = 1e-10  # float64
LENGTH, VOCAB, PAD = 12, 50, 0
KINDS = [("post", "labels"), ("pre", "labels"), ("post", "number"), ("post", "choices"), ("pre", "choices")]
LABELS = ("no", "perhaps", "yes")


def classifier(norm: str, kind: str, *, seed: int = 1) -> BertClassifier:
    sizes = {"layers": 3, "width": 16, "heads": 2, "sequence_length": LENGTH, "vocab_size": VOCAB}
    config = BertConfig(**sizes, norm=norm)  # pyright: ignore[reportArgumentType]
    model = build_classifier(config, outputs=len(LABELS) if kind == "labels" else 1, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.eval()


def batch_of(kind: str, size: int, seed: int) -> ExampleBatch:
    generator = torch.Generator().manual_seed(seed)
    shape = size, len(LABELS) if kind == "choices" else 1, LENGTH
    lengths = torch.randint(2, LENGTH + 1, (*shape[:2], 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    tokens = torch.randint(1, VOCAB, shape, generator=generator) * mask
    labels = torch.randint(len(LABELS), (size,), generator=generator)
    return ExampleBatch(
        input_ids_BCS=tokens,
        token_types_BCS=((torch.arange(LENGTH) > lengths // 2) & mask).long(),
        attention_mask_BCS=mask,
        labels_B=labels.double() if kind == "number" else labels,
        sample_ids_B=torch.arange(size),
    )


@pytest.mark.parametrize(("norm", "kind"), KINDS)
@given(size=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_outputs_loss_and_gradients_are_those_of_hugging_faces(norm: str, kind: str, size: int, seed: int) -> None:
    model, batch = classifier(norm, kind), batch_of(kind, size, seed)
    theirs = as_classifier(model, PAD, labels=LABELS if kind == "labels" else (), choices=kind == "choices")
    names = {"input_ids": batch.input_ids_BCS, "token_type_ids": batch.token_types_BCS}
    names |= {"attention_mask": batch.attention_mask_BCS.long()}
    inputs = names if kind == "choices" else {name: value[:, 0] for name, value in names.items()}
    expected, found = theirs(**inputs, labels=batch.labels_B), model(batch)
    torch.testing.assert_close(found.outputs_BO, expected.logits, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found.mean, expected.loss, rtol=EXACT, atol=EXACT)
    ours, others = gradients(model, found.mean), gradients(theirs, expected.loss)
    torch.testing.assert_close(ours["classifier.weight"], others["classifier.weight"], rtol=EXACT, atol=EXACT)
    word = "bert.embeddings.word_embeddings.weight"
    torch.testing.assert_close(ours["tokens.weight"][1:], others[word][1:], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(("norm", "kind"), KINDS)
def test_a_saved_model_comes_back_by_the_class_that_reads_it(tmp_path, norm: str, kind: str) -> None:
    model, other = classifier(norm, kind), classifier(norm, kind, seed=2)
    labels = LABELS if kind == "labels" else ()
    as_classifier(model, PAD, labels=labels, choices=kind == "choices").save_pretrained(tmp_path)
    reads = AutoModelForMultipleChoice if kind == "choices" else AutoModelForSequenceClassification
    theirs = reads.from_pretrained(tmp_path)
    assert [*theirs.config.id2label.values()] == ([*labels] or ["LABEL_0"])
    begin_with(other, HuggingFaceWeights(str(tmp_path)), may_be_new=())
    batch = batch_of(kind, 3, 0)
    torch.testing.assert_close(other(batch).outputs_BO, model(batch).outputs_BO, rtol=EXACT, atol=EXACT)
