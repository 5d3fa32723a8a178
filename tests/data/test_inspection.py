"""Token shards looked at: samples are the documents they say, counts add up, every changed byte is found."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from corpora import END_OF_TEXT, byte_tokenizer, documents, tiny_job
from tokendrop.cli.main import main
from tokendrop.config.load import load_job
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.read.inspection import Sample, count_tokens, find_sample
from tokendrop.data.read.order import ROW_BITS
from tokendrop.data.shards.format import MANIFEST, REJECTED, SHARDS, SPLITS, TOKENIZER
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.data.shards.verify import verify
from tokendrop.errors import UserError
from tokendrop.train.sealed import seal_text

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ROW = 33
SUBSETS = ["Github", "Wikipedia (en)", ""]


@dataclass(frozen=True)
class Prepared:
    """A corpus of two sources in three files, some lines broken, and its token shards."""

    folder: Path
    texts: dict[tuple[str, int], str]
    """By file and line."""

    def tokens_of(self, file: str, record: int) -> list[int]:
        tokenizer = Tokenizer.from_file(str(self.folder / TOKENIZER))
        return tokenizer.encode(self.texts[file, record] + END_OF_TEXT).ids

    def set_of(self, file: str, record: int) -> str:
        return SUBSETS[(record + len(file)) % len(SUBSETS)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, ray_cluster) -> Prepared:
    folder = tmp_path_factory.mktemp("prepared")
    texts: dict[tuple[str, int], str] = {}
    one = Prepared(folder, texts)
    for number, name in enumerate(("web1.jsonl", "web22.jsonl", "books.jsonl")):
        path, lines = folder / name, ["not JSON\n"]
        for record, text in enumerate(documents(90, words=12, seed=number), start=2):
            texts[str(path), record] = text
            lines.append(json.dumps({"text": text, "meta": {"pile_set_name": one.set_of(str(path), record)}}) + "\n")
        path.write_text("".join(lines))
    sources = [
        {"name": "web", "corpus": [str(folder / "web1.jsonl"), str(folder / "web22.jsonl")], "weight": 2.0},
        {"name": "books", "corpus": [str(folder / "books.jsonl")], "weight": 1.0},
    ]
    data = {
        "corpus": None,
        "sources": sources,
        "tokenizer": str(byte_tokenizer(folder / "bytes.json")),
        "test_share": 0.1,
        "max_rejected": 0.1,
        "rows_per_shard": 96,
    }
    job = tiny_job(folder, [], data=data)
    job.write_text(job.read_text().replace("  corpus: null\n", ""))
    return replace(one, folder=prepare(load_job(job)))


def every_sample(folder: Path) -> list[Sample]:
    manifest = read_manifest(folder)
    return [
        find_sample(folder, source << ROW_BITS | row, split)
        for split in SPLITS
        for source, rows in enumerate(manifest.committed(split).rows)
        for row in range(rows)
    ]


@pytest.fixture(scope="module")
def samples(prepared: Prepared) -> list[Sample]:
    return every_sample(prepared.folder)


def parts(sample: Sample) -> list[tuple[str, int, int, Sequence[int]]]:
    """File, record, first token of the document and the tokens, of each document of a row."""
    starts = [max(0, one.start) for one in sample.documents]
    return [
        (one.file, one.record, max(0, -one.start), sample.tokens[start:end])
        for one, start, end in zip(sample.documents, starts, [*starts[1:], len(sample.tokens)], strict=True)
    ]


def test_each_row_is_the_tokens_of_the_documents_that_it_names(prepared, samples):
    for sample in samples:
        assert len(sample.tokens) == ROW
        assert sample.begins_inside == (sample.documents[0].start < 0)
        for document in sample.documents:
            assert document.subset == prepared.set_of(document.file, document.record)
        for file, record, first, tokens in parts(sample):
            assert list(tokens) == prepared.tokens_of(file, record)[first : first + len(tokens)]
            assert Path(file).name.startswith(sample.source)


def test_the_rows_of_a_source_and_split_follow_each_other_and_no_document_is_in_two(samples):
    read: dict[tuple[str, int], tuple[tuple[str, str], int]] = {}
    for sample in samples:
        for file, record, first, tokens in parts(sample):
            where, reached = read.get((file, record), ((sample.source, sample.split), 0))
            assert (where, first) == ((sample.source, sample.split), reached)
            read[file, record] = where, reached + len(tokens)
    assert {where for where, _ in read.values()} == {(source, split) for source in ("web", "books") for split in SPLITS}


def test_text_is_what_the_tokens_say(prepared, samples):
    whole = [sample for sample in samples if not sample.begins_inside]
    assert 0 < len(whole) < len(samples)
    for sample in whole:
        first = sample.documents[0]
        expected = (prepared.texts[first.file, first.record] + END_OF_TEXT).encode()[:5].decode(errors="ignore")
        assert sample.text.startswith(expected)


@given(source=st.integers(0, 1), row=st.integers(0, 40), epoch=st.integers(0, 2**20))
def test_a_later_epoch_has_the_same_row(prepared, source, row, epoch):
    first = find_sample(prepared.folder, source << ROW_BITS | row, "train")
    later = find_sample(prepared.folder, (2 * epoch + source) << ROW_BITS | row, "train")
    assert later == replace(first, sample=later.sample, epoch=epoch)
    assert later.source == ("web", "books")[source]


@pytest.mark.parametrize("sample", [-1, 2**63, 2**80, 9999, 3 << ROW_BITS | 9999])
def test_a_sample_that_is_not_there_is_named(prepared, sample):
    with pytest.raises(UserError, match=rf"^--sample.*{sample}"):
        find_sample(prepared.folder, sample, "train")


def test_counts_are_those_of_the_documents_in_rows(prepared, samples):
    stats = count_tokens(prepared.folder)
    tokens, begun, sizes = Counter[str](), Counter[str](), Counter[str]()
    by_source = Counter[str]()
    for sample in samples:
        by_source[sample.source] += len(sample.tokens)
        for file, record, first, some in parts(sample):
            name = prepared.set_of(file, record)
            tokens[name] += len(some)
            if not first:
                begun[name] += 1
                sizes[name] += len(prepared.texts[file, record].encode())
    assert {line.name: (line.documents, line.tokens, line.bytes) for line in stats.subsets} == {
        name: (begun[name], tokens[name], sizes[name]) for name in SUBSETS
    }
    assert {line.name: line.tokens for line in stats.sources} == by_source
    assert stats.total.tokens == ROW * len(samples)
    assert stats.is_complete
    assert stats.rejected == 3
    assert stats.rows == Counter(sample.split for sample in samples)
    for lines in (stats.subsets, stats.sources):
        assert sum(line.share for line in lines) == pytest.approx(1)
        assert all(line.tokens_per_byte == line.tokens / line.bytes for line in lines)


def test_counts_grow_to_those_of_the_end_while_preparation_goes_on(prepared, tmp_path):
    folder = tmp_path / "growing"
    shutil.copytree(prepared.folder, folder)
    replace(read_manifest(folder).header, is_complete=False, documents=0, rejected=0, rows=(), subsets=()).write(folder)
    lines = (folder / SHARDS).read_bytes().splitlines(keepends=True)
    (folder / REJECTED).rename(tmp_path / REJECTED)
    tokens = []
    for number in range(len(lines) + 1):
        (folder / SHARDS).write_bytes(b"".join(lines[:number]) + b'{"source": "we')
        stats = count_tokens(folder)
        assert not stats.is_complete
        assert stats.rejected == 0
        assert sum(stats.rows.values()) * ROW == stats.total.tokens
        tokens.append(stats.total.tokens)
        assert verify(folder).shards == number
    assert tokens == sorted(set(tokens))
    (tmp_path / REJECTED).rename(folder / REJECTED)
    assert replace(count_tokens(folder), is_complete=True) == replace(count_tokens(prepared.folder), folder=str(folder))


@given(st.data())
def test_a_changed_byte_anywhere_in_a_shard_is_named_by_its_file(prepared, data):
    shard = data.draw(st.sampled_from(read_manifest(prepared.folder).shards))
    path = prepared.folder / shard.file
    whole = path.read_bytes()
    place, bits = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    try:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])
        found = verify(prepared.folder)
    finally:
        path.write_bytes(whole)
    assert [one.file for one in found.damaged] == [shard.file]


def test_a_changed_token_names_its_row(prepared, tmp_path):
    folder = tmp_path / "changed"
    shutil.copytree(prepared.folder, folder)
    manifest = read_manifest(folder)
    shard = manifest.of(manifest.header.sources[0], "train")[0]
    sample = find_sample(folder, 7, "train")
    row = np.array(sample.tokens, np.uint16).tobytes()
    content = (folder / shard.file).read_bytes()
    assert content.count(row) == 1
    (folder / shard.file).write_bytes(content.replace(row, row[::-1]))
    (damage,) = verify(folder).damaged
    assert damage.what == "its sha256 is not the manifest's; changed rows: 7"


def test_whole_shards_are_whole_and_all_damaged_files_are_named(prepared, tmp_path, capsys):
    told: list[tuple[int, int]] = []
    found = verify(prepared.folder, progress=lambda *seen: told.append(seen))
    shards = read_manifest(prepared.folder).shards
    assert (found.damaged, found.shards, found.rows) == ((), len(shards), sum(shard.rows for shard in shards))
    assert told == sorted(told)
    assert told[-1] == (found.bytes, found.bytes)
    main(["data", "verify", str(prepared.folder)])
    assert capsys.readouterr().out.endswith("all as they were written\n")

    folder = tmp_path / "damaged"
    shutil.copytree(prepared.folder, folder)
    (folder / shards[0].file).unlink()
    (folder / shards[1].file).write_bytes((folder / shards[1].file).read_bytes()[:-1])
    shutil.copyfile(folder / shards[3].file, folder / shards[2].file)
    (folder / TOKENIZER).write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["data", "verify", str(folder), "--json"])
    assert ended.value.code == 1
    names = [one["file"] for one in json.loads(capsys.readouterr().out)["damaged"]]
    assert names == [TOKENIZER, *(shard.file for shard in shards[:3])]
    with pytest.raises(SystemExit):
        main(["data", "verify", str(folder)])
    said = capsys.readouterr().out
    assert f"{folder}/{shards[0].file}: No such file or directory\n" in said
    assert "4 damaged, of " in said


def test_commands_take_a_folder_its_manifest_or_a_run(prepared, tmp_path, capsys):
    (tmp_path / "data.txt").write_text(seal_text(f"{prepared.folder}\n"))
    (tmp_path / "job.yaml").write_text(seal_text((prepared.folder.parents[2] / "job.yaml").read_text()))
    said = []
    for path in (prepared.folder, prepared.folder / MANIFEST, tmp_path):
        main(["data", "show", str(path), "--sample", "5", "--json"])
        main(["data", "stats", str(path)])
        said.append(capsys.readouterr().out)
    assert len(set(said)) == 1
    assert "source  documents" in said[0]
    assert "(not named)" in said[0]

    (tmp_path / "data.txt").write_text(seal_text(f"{tmp_path / 'gone'}\n"))
    for path, why in (
        (tmp_path, "the token shards of this run are gone"),
        (tmp_path / "nowhere", "want a folder of token shards, its manifest.json, or a run folder"),
        (prepared.folder / TOKENIZER, "want a folder of token shards"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["data", "stats", str(path)])
        assert ended.value.code == 2
        assert why in (error := capsys.readouterr().err)
        assert len(error.splitlines()) == 1


def test_what_is_printed_moves_no_cursor(prepared, capsys, samples):
    from tokendrop.cli.data import printable

    assert printable("a\x1b[2Jb\r\n\tc\u2028 東京 🚢") == "a\\x1b[2Jb\\r\n\tc\\u2028 東京 🚢"
    inside = next(sample for sample in samples if sample.begins_inside and sample.split == "train")
    main(["data", "show", str(prepared.folder), "--sample", str(inside.sample)])
    said = capsys.readouterr().out
    assert f"The row begins inside its first document, {-inside.documents[0].start} tokens after its start." in said
    assert f"{inside.documents[0].file}:{inside.documents[0].record}" in said
    assert " ".join(said.split()).endswith(" ".join(map(str, inside.tokens)))
