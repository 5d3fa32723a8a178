"""The documents that were written are the documents that are read."""

import gzip
import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from corpora import json_lines, write_corpus
from records import LINES, TABLES, read, texts_of, write_rows
from tokendrop.data.corpus.records import Record
from tokendrop.data.corpus.sources import SUFFIXES
from tokendrop.errors import UserError

# --- whole files ---


@given(
    texts=st.lists(st.text(), max_size=12),
    suffix=st.sampled_from(LINES + TABLES),
    parts=st.integers(1, 4),
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\r\n"]),
)
def test_every_format_gives_back_the_documents_in_order(texts, suffix, parts, ascii_only, end):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"corpus{suffix}"
        assert texts_of(write_corpus(path, texts, parts=parts, ascii_only=ascii_only, end=end)) == texts


@given(
    rows=st.lists(st.tuples(st.text(max_size=9), st.none() | st.sampled_from(["Books", "Web", ""])), min_size=1),
    only=st.sets(st.sampled_from(["Books", "Web", "", "absent"])),
    limit=st.integers(1, 20),
    after=st.integers(0, 12),
)
def test_every_format_gives_the_same_records_and_after_leaves_out_the_first(rows, only, limit, after):
    expected = [
        Record(number, text, name or "")
        if len(text.encode()) <= limit
        else Record(number, "", name or "", f"longer than {limit} bytes")
        for number, (text, name) in enumerate(rows, start=1)
        if not only or (name or "") in only
    ]
    written = [{"text": text, "meta": {"pile_set_name": name}} for text, name in rows]
    with tempfile.TemporaryDirectory() as folder:
        for suffix in LINES + TABLES:
            path = write_rows(Path(folder) / f"corpus{suffix}", written)
            keys = {"only": tuple(only), "max_document_bytes": limit}
            assert read(path, **keys) == expected
            assert read(path, after=after, **keys) == [record for record in expected if record.number > after]


def test_a_line_is_numbered_as_an_editor_does(tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(b'\n{"text": "two"}\r\n \nnot json\n\n{"text": "six"}')
    found = read(tmp_path / "corpus.jsonl")
    assert [(record.number, record.text) for record in found] == [(2, "two"), (4, ""), (6, "six")]
    assert read(tmp_path / "corpus.jsonl", after=4) == found[2:]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x00"])
def test_only_a_newline_ends_a_line(tmp_path, separator):
    texts = [f"one{separator}two", f"{separator}"]
    assert texts_of(write_corpus(tmp_path / "corpus.jsonl", texts, ascii_only=False)) == texts
    (tmp_path / "corpus.txt").write_bytes(f"one{separator}two".encode())
    assert texts_of(tmp_path / "corpus.txt") == [f"one{separator}two"]


@pytest.mark.parametrize("squeeze", [bytes, zstandard.compress, gzip.compress])
def test_a_byte_order_mark_is_not_text(tmp_path, squeeze):
    suffix = {zstandard.compress: ".zst", gzip.compress: ".gz"}.get(squeeze, "")
    (tmp_path / f"corpus.jsonl{suffix}").write_bytes(squeeze(b"\xef\xbb\xbf" + json_lines(["one"])))
    assert texts_of(tmp_path / f"corpus.jsonl{suffix}") == ["one"]
    (tmp_path / "corpus.txt").write_bytes(b"\xef\xbb\xbfone")
    assert texts_of(tmp_path / "corpus.txt") == ["one"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_of_no_documents_has_no_records_and_one_of_no_bytes_is_damaged_where_it_should_have_some(
    tmp_path, suffix
):
    assert read(write_corpus(tmp_path / f"corpus{suffix}", [])) == []
    (tmp_path / f"nothing{suffix}").write_bytes(b"")
    found = read(tmp_path / f"nothing{suffix}")
    if suffix in (".jsonl", ".txt"):
        assert found == []
    else:
        assert found == [Record(1, "", "", "damaged or cut short from here on (it is empty)")]
        assert read(tmp_path / f"nothing{suffix}", after=1) == []


@given(st.lists(st.text(alphabet="ab \n\r\u2028é", max_size=40_000), max_size=4).map("\n\n".join), st.integers(0, 3))
def test_the_documents_of_a_text_file_are_its_text_cut_at_line_ends(text, after):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        path.write_bytes(text.encode())
        records = read(path)
        assert read(path, after=after) == records[after:]
    assert [record.number for record in records] == [*range(1, len(records) + 1)]
    pieces = [record.text for record in records]
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert "" not in pieces


@pytest.mark.parametrize("blank_line_every", [10, None])
@pytest.mark.parametrize("limit", [2**26, 1000])
def test_a_large_text_file_comes_in_pieces_with_and_without_blank_lines(tmp_path, blank_line_every, limit):
    lines = [
        "\n" if blank_line_every and number % blank_line_every == 0 else f"line {number} of a long text\n"
        for number in range(60_000)
    ]
    (tmp_path / "corpus.txt").write_text("".join(lines))
    pieces = [record.text for record in read(tmp_path / "corpus.txt", max_document_bytes=limit)]
    assert "".join(pieces) == "".join(lines)
    assert max(map(len, pieces)) < min(300_000, limit + 1)


def test_a_text_file_rejects_the_pieces_that_are_no_text_and_belongs_to_no_set(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(b"first\n" + b"x" * 50 + b"\ncaf\xe9\n")
    assert read(tmp_path / "corpus.txt", max_document_bytes=20) == [
        Record(1, "first\n", ""),
        Record(2, "", "", "longer than 20 bytes"),
        Record(3, "", "", "not valid UTF-8 at byte 4"),
    ]
    assert read(tmp_path / "corpus.txt", only=("Books",)) == []


def test_the_sets_of_a_real_sample_are_those_that_its_lines_name(real_data):
    path = real_data / "pile_like" / "redpajama_sample.jsonl.zst"
    named = Counter(
        json.loads(line)["meta"]["pile_set_name"] for line in zstandard.open(path, "rb").read().splitlines()
    )
    records = read(path)
    assert Counter(record.subset for record in records) == named
    assert len(records) == 4262
    assert {record.reason for record in records} == {""}
    some = ("ArXiv", "Wikipedia (en)")
    assert read(path, only=some) == [record for record in records if record.subset in some]
    assert read(path, after=4000) == records[4000:]


# --- keys ---


@pytest.mark.parametrize("suffix", LINES + TABLES)
def test_dots_in_a_key_reach_into_fields_and_a_name_with_dots_comes_first(tmp_path, suffix):
    rows = [
        {"doc": {"body": {"text": "a"}}, "meta": {"subset": "inner"}, "meta.name": "outer"},
        {"doc": {"body": {"text": "b"}}, "meta": None, "meta.name": None},
    ]
    path = write_rows(tmp_path / f"corpus{suffix}", rows)
    assert read(path, text_key="doc.body.text", subset_key="meta.subset") == [
        Record(1, "a", "inner"),
        Record(2, "b", ""),
    ]
    assert read(path, text_key="doc.body.text", subset_key="meta.name") == [Record(1, "a", "outer"), Record(2, "b", "")]
    for absent in ("nothing", "meta.nothing", "doc.body.text.more", "nothing.at.all"):
        assert [record.subset for record in read(path, text_key="doc.body.text", subset_key=absent)] == ["", ""]


@pytest.mark.parametrize("suffix", LINES + TABLES)
@pytest.mark.parametrize("name", [3, True, ["Books"], {"of": "Books"}])
def test_a_set_that_is_no_text_is_rejected(tmp_path, suffix, name):
    (record,) = read(write_rows(tmp_path / f"corpus{suffix}", [{"text": "a", "subset": name}]), subset_key="subset")
    assert (record.text, record.subset) == ("", "")
    assert record.reason.startswith("want text in 'subset', got ")


@pytest.mark.parametrize("suffix", TABLES)
def test_a_table_without_the_text_column_lists_the_columns_that_it_has(tmp_path, suffix):
    path = write_rows(tmp_path / f"corpus{suffix}", [{"body": {"x": "y"}, "url": "z"}])
    for key in ("text", "body.text", "url.text"):
        with pytest.raises(UserError) as caught:
            read(path, text_key=key)
        assert str(caught.value) == f"{path}: no column '{key}' (data.text_key), it has body, url"
