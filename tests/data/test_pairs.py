"""What BERT reads: pairs of one document, two tasks, masks; the same whoever reads them and whenever."""

import shutil
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pairs import LENGTH, texts, write_pairs
from tokendrop.config.data import PairsConfig
from tokendrop.data.prepare.encoder import Encoder
from tokendrop.data.read.batches import MicroBatches
from tokendrop.data.read.mask_tokens import IGNORED
from tokendrop.data.read.order import ROW_BITS, SampleOrder, first_ids
from tokendrop.data.read.pairs import (
    PairMaker,
    PairSamples,
    held_out_pairs,
)
from tokendrop.data.read.row_reader import FAILED, Rows
from tokendrop.data.shards.format import MANIFEST, SHARDS
from tokendrop.data.tokenizer import load_tokenizer, pair_vocabulary
from tokendrop.models.batch import BertBatch
from tokendrop.schedule.batch import BatchSplit
from tokendrop.tasks.masked_lm import pair_batch

WINDOW = 64
TASKS = pytest.mark.parametrize("task", ["sop", "nsp"])
CORPUS = texts(160)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder, CORPUS)
    return folder


@cache
def tokenizer_of(folder: Path) -> Tokenizer:
    return load_tokenizer(folder / "tokenizer.json", "sentence_pairs")


def reader(
    folder: Path,
    task: str,
    *,
    world_size: int = 1,
    rank: int = 0,
    micro_batch: int = 4,
    seed: int = 7,
    window: int = WINDOW,
    **pairs: object,
) -> MicroBatches[BertBatch]:
    config = PairsConfig(sentence_task=task, **pairs)
    make = PairMaker(config, pair_vocabulary(tokenizer_of(folder)), sequence_length=LENGTH, seed=seed)
    order = SampleOrder(seed=seed, weights=[1.0], window=window)
    return MicroBatches(
        partial(pair_batch, pairs=make),
        train=PairSamples(Rows(folder, "train"), order, config, seed=seed),
        validation=held_out_pairs(Rows(folder, "validation"), first_ids(0, 40), config, seed=seed),
        split=BatchSplit(global_batch=16, micro_batch=micro_batch, world_size=world_size),
        rank=rank,
    )


def by_id(batches: list[BertBatch]) -> dict[int, tuple[object, ...]]:
    """All that is read of each sample, by its id."""
    found = {}
    for batch in batches:
        for place, sample in enumerate(batch.sample_ids_B.tolist()):
            assert sample not in found
            parts = (batch.input_ids_BS, batch.token_types_BS, batch.attention_mask_BS, batch.labels_BS)
            found[sample] = (*(part[place].tolist() for part in parts), int(batch.sentence_labels_B[place]))
    return found


def steps(batches: MicroBatches[BertBatch], *numbers: int) -> list[BertBatch]:
    return [batch for step in numbers for batch in batches.of_step(step)]


def counted(batches: MicroBatches[BertBatch]) -> list[BertBatch]:
    """The held-out batches without those that only fill a worker's share."""
    return [batch for batch, counts in batches.validation() if counts]


def unmasked(tokens: list[int], labels: list[int]) -> list[int]:
    return [token if label == IGNORED else label for token, label in zip(tokens, labels, strict=True)]


def sides(sample: tuple[object, ...], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """A and B as they were before masking, by what stands between the special tokens."""
    tokens, _, real, labels, _ = sample
    sep = tokenizer.token_to_id("[SEP]")
    tokens = unmasked(tokens, labels)[: sum(real)]
    assert tokens[0] == tokenizer.token_to_id("[CLS]")
    assert tokens.count(sep) == 2
    assert tokens[-1] == sep
    middle = tokens.index(sep)
    return tokens[1:middle], tokens[middle + 1 : -1]


def holds(document: list[int], part: list[int]) -> bool:
    return any(document[start : start + len(part)] == part for start in range(len(document) - len(part) + 1))


@TASKS
@pytest.mark.parametrize("whole_words", [False, True])
def test_a_pair_is_neighbouring_text_of_one_document_or_what_its_label_says(folder, task, whole_words):
    tokenizer = tokenizer_of(folder)
    documents = [ids.tolist() for ids in Encoder(tokenizer)(CORPUS)]
    samples = by_id(steps(reader(folder, task, whole_words=whole_words), *range(7)))
    wrong = 0
    for sample in samples.values():
        a, b = sides(sample, tokenizer)
        assert a
        assert b
        of_one = any(holds(document, a + b) for document in documents)
        if not sample[-1]:
            assert of_one
        elif task == "sop":
            assert any(holds(document, b + a) for document in documents)
        else:
            assert any(holds(document, a) for document in documents)
            assert any(holds(document, b) for document in documents)
        wrong += not of_one
    assert wrong > 30


def test_pairs_that_are_put_right_decode_to_their_text(folder):
    tokenizer = tokenizer_of(folder)
    whole = [" ".join(one.split()).lower().replace(".", " .") for one in CORPUS]
    for sample in by_id(steps(reader(folder, "sop"), 0, 1)).values():
        a, b = sides(sample, tokenizer)
        said = tokenizer.decode(b + a if sample[-1] else a + b).replace(".", " .").replace("  ", " ").strip()
        assert any(said.removeprefix("##") in one for one in whole)


@TASKS
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 16), (2, 4), (4, 2), (16, 1)])
def test_samples_do_not_depend_on_ranks_micro_batches_or_the_order_of_reading(folder, task, world_size, micro_batch):
    alone = reader(folder, task)
    wanted = by_id(steps(alone, 0, 1, 2))
    ranks = [
        reader(folder, task, world_size=world_size, rank=rank, micro_batch=micro_batch) for rank in range(world_size)
    ]
    found = by_id([batch for rank in reversed(ranks) for batch in steps(rank, 2, 0, 1)])
    assert found == wanted
    held_out = by_id(counted(reader(folder, task, micro_batch=2)))
    shared = by_id(
        [batch for rank in range(2) for batch in counted(reader(folder, task, world_size=2, rank=rank, micro_batch=2))]
    )
    assert shared == held_out
    assert len(held_out) == 40


@TASKS
def test_each_epoch_makes_other_pairs_and_masks_of_the_same_rows(folder, task):
    batches = reader(folder, task, whole_words=False)
    (rows,) = Rows(folder, "train").committed.rows
    epoch = rows // 16
    both = by_id(steps(batches, *range(2 * epoch)))
    row = (1 << ROW_BITS) - 1
    first, second = ({sample & row: read for sample, read in both.items() if sample >> ROW_BITS == n} for n in (0, 1))
    same = [
        one for one in set(first) & set(second) if sum(first[one][2]) > 25
    ]  # short ones have few masks to choose from
    assert len(same) > 100
    assert sum(first[one][3] == second[one][3] for one in same) < 0.02 * len(same)
    assert 0.3 < sum(first[one][-1] == second[one][-1] for one in same) / len(same) < 0.7
    assert by_id(steps(reader(folder, task, seed=8), 0)) != by_id(steps(batches, 0))


@TASKS
def test_half_of_the_pairs_are_wrong_and_a_seventh_of_their_tokens_is_masked(folder, task):
    samples = by_id(steps(reader(folder, task, whole_words=False), *range(100))).values()
    count = len(samples)
    assert count == 1600
    assert abs(sum(sample[-1] for sample in samples) / count - 0.5) < 4 * 0.5 / count**0.5
    for tokens, types, real, labels, _ in samples:
        masked = [place for place, label in enumerate(labels) if label != IGNORED]
        assert len(masked) == max(1, round(0.15 * (sum(real) - 3)))
        special = {0, types.index(1) - 1, sum(real) - 1}
        assert not special & set(masked)
        assert [place for place, token in enumerate(tokens) if not real[place]] == [*range(sum(real), LENGTH)]
        assert not any(tokens[sum(real) :])
        assert not any(types[sum(real) :])
        assert max(masked) < sum(real)


def test_words_are_masked_with_all_of_their_pieces(folder):
    continues = pair_vocabulary(tokenizer_of(folder)).continues_V
    most = 0
    for tokens, types, real, labels, _ in by_id(steps(reader(folder, "sop"), *range(20))).values():
        before, second = unmasked(tokens, labels), types.index(1)
        masked = [label != IGNORED for label in labels]
        for place in range(1, sum(real) - 1):
            if continues[before[place]] and place not in (1, second):
                assert masked[place] == masked[place - 1]
                most += masked[place]
    assert most > 100


def test_a_classifier_on_lengths_tells_next_sentences_from_others_no_better_than_chance(folder):
    make = PairMaker(
        PairsConfig(sentence_task="nsp"), pair_vocabulary(tokenizer_of(folder)), sequence_length=LENGTH, seed=7
    )
    rows = Rows(folder, "train")
    samples = PairSamples(rows, SampleOrder(seed=7, weights=[1.0], window=WINDOW), make.config, seed=7)
    pairs, labels = make.pairs(*samples.at(np.arange(80_000)))
    lengths = pairs.first_B * LENGTH + pairs.second_B
    learned, told = slice(0, None, 2), slice(1, None, 2)
    seen = [np.bincount(lengths[learned][labels[learned] == label], minlength=LENGTH**2) for label in (0, 1)]
    guessed = (seen[1] > seen[0])[lengths[told]]  # the best that can be learned of two lengths
    assert 0.49 < np.mean(labels) < 0.51
    assert np.mean(guessed == labels[told]) <= 0.51
    kept = (pairs.first_B + pairs.second_B).mean() / samples.rows.read(np.arange(rows.committed.rows[0]))[:, 0].mean()
    assert kept > 0.8  # that B is cut costs few tokens


def test_another_text_stands_for_b_and_is_not_known_by_how_it_begins_and_ends(folder):
    tokenizer = tokenizer_of(folder)
    stop = tokenizer.token_to_id(".")
    ended = {0: [], 1: []}
    for sample in by_id(steps(reader(folder, "nsp"), *range(100))).values():
        _, b = sides(sample, tokenizer)
        ended[sample[-1]].append(b[-1] == stop)
    assert abs(np.mean(ended[0]) - np.mean(ended[1])) < 0.1


def test_the_text_in_the_place_of_b_is_of_the_same_window_however_far_preparation_is(folder, tmp_path):
    early = tmp_path / "early"
    shutil.copytree(folder, early)
    lines = (folder / SHARDS).read_text().splitlines(keepends=True)
    (early / SHARDS).write_text("".join(lines[:4]))  # two shards of either split
    header = (folder / MANIFEST).read_text().replace('"is_complete": true', '"is_complete": false')
    (early / MANIFEST).write_text(header)
    some, whole = reader(early, "nsp", window=16), reader(folder, "nsp", window=16)
    count, of = (Rows(one, "train").committed.rows[0] // 16 for one in (early, folder))
    assert 2 <= count < of
    assert by_id(steps(some, *range(count))) == by_id(steps(whole, *range(count)))

    tokenizer = tokenizer_of(folder)
    in_window = Rows(folder, "train").read(np.arange(16)).tolist()
    for sample in by_id(steps(whole, 0)).values():
        _, b = sides(sample, tokenizer)
        assert any(holds(row[1 : 1 + row[0]], b) for row in in_window)
    (early / FAILED).write_text("no more")  # what is read ahead is waited for no longer


def test_a_row_that_is_alone_in_its_window_keeps_its_b(folder):
    samples = by_id(steps(reader(folder, "nsp", window=1), 0, 1)).values()
    assert not any(sample[-1] for sample in samples)
