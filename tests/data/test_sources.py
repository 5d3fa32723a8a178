"""Corpora on disk: the documents that were written are the documents that are read."""

import gzip
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from corpora import documents, json_lines, write_corpus
from tokendrop.data.sources import SUFFIXES, list_files, read_documents
from tokendrop.errors import UserError

TEXTS = st.lists(st.text(), max_size=12)
DOCUMENT_SUFFIXES = [suffix for suffix in SUFFIXES if suffix != ".txt"]


def files_of(*corpus: Path | str):
    return list_files(tuple(map(str, corpus)), cache=Path("unused"))


def read(*corpus: Path | str) -> list[str]:
    return [text for file in files_of(*corpus) for text in read_documents(file, "text")]


def complaint(path: Path) -> str | None:
    try:
        read(path)
    except UserError as error:
        return str(error)
    return None


@given(
    texts=TEXTS,
    suffix=st.sampled_from(DOCUMENT_SUFFIXES),
    parts=st.integers(1, 4),
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\r\n"]),
)
def test_every_format_gives_back_the_documents_in_order(texts, suffix, parts, ascii_only, end):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"corpus{suffix}"
        assert read(write_corpus(path, texts, parts=parts, ascii_only=ascii_only, end=end)) == texts


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_a_newline_ends_a_line(tmp_path, separator):
    texts = [f"one{separator}two", f"{separator}"]
    assert read(write_corpus(tmp_path / "corpus.jsonl", texts, ascii_only=False)) == texts


def test_a_last_line_without_a_newline_counts(tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(json_lines(["one", "two"]).removesuffix(b"\n"))
    assert read(tmp_path / "corpus.jsonl") == ["one", "two"]


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(["one"]))
    (tmp_path / "corpus.txt").write_bytes(b"\xef\xbb\xbfone")
    assert read(tmp_path / "corpus.jsonl", tmp_path / "corpus.txt") == ["one", "one"]


@given(st.lists(st.text(alphabet="ab \n\r\u2028é", max_size=40_000), max_size=4).map("\n\n".join))
def test_the_documents_of_a_text_file_are_its_text_cut_at_line_ends(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        path.write_bytes(text.encode())
        pieces = read(path)
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert "" not in pieces


@pytest.mark.parametrize("blank_line_every", [10, None])
def test_a_large_text_file_comes_in_pieces_with_and_without_blank_lines(tmp_path, blank_line_every):
    lines = [
        "\n" if blank_line_every and number % blank_line_every == 0 else f"line {number} of a long text\n"
        for number in range(60_000)
    ]
    (tmp_path / "corpus.txt").write_text("".join(lines))
    pieces = read(tmp_path / "corpus.txt")
    assert "".join(pieces) == "".join(lines)
    assert max(map(len, pieces)) < 300_000


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_file_has_no_documents(tmp_path, suffix):
    path = write_corpus(tmp_path / f"corpus{suffix}", [])
    assert read(path) == []


def test_a_folder_a_glob_and_a_list_give_files_by_name_and_entries_as_given(tmp_path):
    for name in ("b.jsonl", "a.jsonl.zst", "sub/c.parquet", ".hidden/x.jsonl", "sub/.y.jsonl", "README.md"):
        write_corpus(tmp_path / name, [name])
    (tmp_path / "looks_like.parquet").mkdir()
    assert read(tmp_path) == ["a.jsonl.zst", "b.jsonl", "sub/c.parquet"]
    assert read(f"{tmp_path}/*.jsonl*") == ["a.jsonl.zst", "b.jsonl"]
    assert read(f"{tmp_path}/**/*.parquet") == ["sub/c.parquet"]
    assert read(tmp_path / "sub", tmp_path / "b.jsonl") == ["sub/c.parquet", "b.jsonl"]
    assert read(tmp_path / "b.jsonl", tmp_path / "b.jsonl") == ["b.jsonl", "b.jsonl"]


@pytest.mark.parametrize("name", ["ünï 東京.jsonl", "a b.jsonl.zst", "part [1].jsonl", "100%.parquet", "a#b?.jsonl.gz"])
def test_names_may_hold_any_letters(tmp_path, name):
    assert read(write_corpus(tmp_path / "data of é" / name, ["text"])) == ["text"]


def test_a_relative_path_and_a_home_path_are_made_absolute(tmp_path, monkeypatch):
    write_corpus(tmp_path / "corpus.jsonl", ["text"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [file.name for file in files_of("corpus.jsonl", "~/corpus.jsonl")] == [str(tmp_path / "corpus.jsonl")] * 2


@pytest.mark.parametrize("entry", ["missing.jsonl", "empty_folder", "*.parquet", "notes.md", "*.md"])
def test_an_entry_that_matches_nothing_readable_is_named(tmp_path, entry):
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "notes.md").write_text("notes")
    with pytest.raises(UserError, match=r"data\.corpus.*want \.jsonl"):
        files_of(tmp_path / entry)


@pytest.mark.parametrize("scheme", ["http", "gopher", "nothing"])
def test_a_store_that_pyarrow_does_not_know_is_named(scheme):
    with pytest.raises(UserError, match=f"can't open {scheme}://host/corpus.jsonl"):
        files_of(f"{scheme}://host/corpus.jsonl")


BROKEN_LINES = {
    b'{"text": "open': "not valid JSON",
    b"\xff\xfe": "not valid UTF-8",
    b'{"text": "\\ud83d"}': "half of a surrogate pair",
    b'{"text": null}': "want a JSON object with text in 'text'",
    b'{"body": "x"}': "want a JSON object with text in 'text'",
    b'["text"]': "want a JSON object with text in 'text'",
    b'{"text": %s}' % (b"1" * 5000): "can't read this JSON",
    b'{"text": %s}' % (b"[" * 100_000): "can't read this JSON",
}


@pytest.mark.parametrize("line", BROKEN_LINES, ids=lambda line: line[:16].decode(errors="replace"))
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz"])
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line, suffix):
    path = tmp_path / f"corpus{suffix}"
    squeeze = {".zst": zstandard.compress, ".gz": gzip.compress}.get(path.suffix, bytes)
    path.write_bytes(squeeze(json_lines(["one"]) + b"\n" + line + b"\n" + json_lines(["two"])))
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert BROKEN_LINES[line] in str(caught.value)


def test_a_parquet_file_without_the_column_lists_the_columns_that_it_has(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "url": ["y"]}), tmp_path / "corpus.parquet")
    with pytest.raises(UserError, match=r"corpus\.parquet: no column 'text' .*body, url"):
        read(tmp_path / "corpus.parquet")


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (pa.array(["a", None]), "got nothing"),
        (pa.array([b"a", b"b"]), "got bytes"),
        (pa.array([1, 2]), "got int"),
    ],
)
def test_a_parquet_value_that_is_no_text_is_named_by_row(tmp_path, column, found):
    pq.write_table(pa.table({"text": column}), tmp_path / "corpus.parquet")
    with pytest.raises(UserError, match=rf"corpus\.parquet: row [12]: want text in 'text'.*{found}"):
        read(tmp_path / "corpus.parquet")


@given(
    suffix=st.sampled_from(SUFFIXES),
    cut=st.floats(0, 1),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
    noise=st.none() | st.binary(max_size=200),
)
def test_damage_gives_one_line_that_names_the_file_or_is_not_seen(suffix, cut, changes, noise):
    with tempfile.TemporaryDirectory() as folder:
        path = write_corpus(Path(folder) / f"corpus{suffix}", documents(30), parts=3)
        damaged = bytearray(path.read_bytes() if noise is None else noise)
        damaged = damaged[: round(cut * len(damaged))]
        for place, byte in changes if damaged else []:
            damaged[int(place * len(damaged))] = byte
        path.write_bytes(damaged)
        said = complaint(path)
    assert said is None or (said.startswith(str(path)) and "\n" not in said)


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz", ".parquet"])
def test_a_file_cut_short_is_always_noticed(tmp_path, suffix):
    whole = write_corpus(tmp_path / f"whole{suffix}", documents(30), parts=1).read_bytes()
    for length in range(1, len(whole), 97):
        (tmp_path / f"cut{suffix}").write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut\..*damaged, cut short"):
            read(tmp_path / f"cut{suffix}")
