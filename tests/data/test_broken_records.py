"""What can't be read is told record by record, and takes nothing else with it."""

import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpora import documents, json_lines, write_corpus
from records import LINES, SQUEEZE, TABLES, form, read, texts_of
from tokendrop.data.corpus.records import Record, read_records
from tokendrop.data.corpus.sources import SUFFIXES, list_files
from tokendrop.errors import UserError

# --- records that can't be read ---

BROKEN_LINES = {
    b'{"text": "open': "not valid JSON (Invalid control character at at column 15)",
    b"{text: 1}": "not valid JSON (Expecting property name enclosed in double quotes at column 2)",
    b'{"text": "a"} {"text": "b"}': "not valid JSON (Extra data at column 15)",
    b'{"text": "\x00"}': "not valid JSON (Invalid control character at at column 11)",
    b'{"text": "caf\xe9"}': "not valid UTF-8 at byte 14",
    b"\xff\xfe": "not valid UTF-8 at byte 1",
    b'{"text": "\\ud83d"}': "\\ud83d is half of a surrogate pair",
    b'{"text": "a", "meta": {"pile_set_name": "\\udc00"}}': "\\udc00 is half of a surrogate pair",
    b'{"text": null}': "want text in 'text', got nothing",
    b'{"body": "x"}': "want text in 'text', got nothing",
    b'{"text": 3.5}': "want text in 'text', got a number",
    b'{"text": NaN}': "want text in 'text', got a number",
    b'{"text": true}': "want text in 'text', got true or false",
    b'{"text": ["a"]}': "want text in 'text', got a list",
    b'{"text": {"a": "b"}}': "want text in 'text', got an object",
    b'["text"]': "want a JSON object, got a list",
    b'"text"': "want a JSON object, got text",
    b'{"text": %s}' % (b"1" * 5000): "a number of too many digits",
    b'{"text": %s}' % (b"[" * 100_000): "nested too deep",
    b'{"text": "%s"}' % (b"x" * 1001): "longer than 1000 bytes",
    b'{"text": "%s"}' % ("é".encode() * 501): "longer than 1000 bytes",
    b'{"text": "%s"}' % (b"x" * 3_000_000): "longer than 1000 bytes",
}


@pytest.mark.parametrize("line", BROKEN_LINES, ids=lambda line: line[:40].decode(errors="replace"))
@pytest.mark.parametrize("suffix", LINES)
def test_a_broken_line_is_rejected_and_those_around_it_are_read(tmp_path, line, suffix):
    path = tmp_path / f"corpus{suffix}"
    squeeze = SQUEEZE.get(path.suffix, bytes)
    path.write_bytes(squeeze(json_lines(["one"]) + b"\n" + line + b"\n" + json_lines(["two"])))
    rejected = Record(3, "", "", BROKEN_LINES[line])
    assert read(path, max_document_bytes=1000) == [Record(1, "one", ""), rejected, Record(4, "two", "")]


@given(st.lists(st.binary(max_size=12) | st.sampled_from([*BROKEN_LINES, b'{"text": "a"}', b" "]), max_size=6))
def test_every_line_that_is_not_blank_is_a_record_whatever_it_holds(lines):
    content = b"\n".join(lines).removeprefix(b"\xef\xbb\xbf")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        path.write_bytes(content)
        records = read(path)
    numbers = [number for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    assert [record.number for record in records] == numbers
    assert all("\n" not in record.reason and not (record.text and record.reason) for record in records)


@pytest.mark.parametrize("suffix", TABLES)
@pytest.mark.parametrize(
    ("column", "found"),
    [
        (pa.array(["a", None]), [None, "nothing"]),
        (pa.array([b"a", None]), ["binary", "nothing"]),
        (pa.array([1, None]), ["int64", "nothing"]),
        (pa.array([["a"], None], pa.list_(pa.field("element", pa.string()))), ["list<element: string>", "nothing"]),
        (pa.nulls(2), ["nothing", "nothing"]),
        (
            pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff", b"b"]).buffers()),
            ["bytes that are not UTF-8", None],
        ),
    ],
    ids=["null", "binary", "number", "list", "nothing", "not UTF-8"],
)
def test_a_value_of_a_table_that_is_no_text_is_rejected_by_row(tmp_path, suffix, column, found):
    path = tmp_path / f"corpus{suffix}"
    write_table(path, pa.table({"text": column}))
    reasons = [record.reason for record in read(path)]
    assert reasons == ["" if one is None else f"want text in 'text', got {one}" for one in found]


def write_table(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table)


@pytest.mark.parametrize("suffix", TABLES)
@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_text_of_any_arrow_type_is_text(tmp_path, suffix, kind):
    texts = ["a", "b" * 50, "", "a"]
    write_table(tmp_path / f"corpus{suffix}", pa.table({"text": pa.array(texts).cast(kind)}))
    assert texts_of(tmp_path / f"corpus{suffix}") == texts


# --- damaged files ---


def is_damage(record: Record) -> bool:
    return record.reason.startswith("damaged or cut short from here on (") and record.text == record.subset == ""


@given(suffix=st.sampled_from(SUFFIXES), cut=st.floats(0, 1), parts=st.integers(1, 5))
def test_a_file_cut_short_gives_its_first_records_and_one_rejected(suffix, cut, parts):
    with tempfile.TemporaryDirectory() as folder:
        path = write_corpus(Path(folder) / f"corpus{suffix}", documents(30), parts=parts)
        whole, content = read(path), path.read_bytes()
        length = round(cut * len(content))
        path.write_bytes(content[:length])
        if suffix == ".tsv" and 0 < length < len("text"):
            with pytest.raises(UserError, match=r"no column 'text'"):
                read(path)
            return
        records = read(path)
        for left_out in {0, min(7, len(records)), max(0, len(records) - 1), len(records)}:
            after = records[left_out - 1].number if left_out else 0
            assert read(path, after=after) == records[left_out:]
    if suffix == ".txt":
        assert (
            "".join(record.text for record in whole).encode().startswith(records[0].text.encode() if records else b"")
        )
        return
    if suffix == ".tsv" and length:  # what is left of a line is a shorter one
        assert "".join(record.text for record in whole).startswith("".join(record.text for record in records))
        return
    good = [record for record in records if not record.reason]
    assert good == whole[: len(good)]
    assert [record.number for record in records] == [*range(1, len(records) + 1)]
    assert len(records) - len(good) <= 1
    if length < len(content) and (suffix in TABLES or (parts == 1 and suffix != ".jsonl")):
        assert is_damage(records[-1])  # what ends between two frames or members is whole


def test_all_batches_before_the_damage_are_read(tmp_path):
    texts = documents(24)
    ends = [len(write_corpus(tmp_path / "part.arrow", texts[:n], parts=n // 6).read_bytes()) for n in (6, 12, 18, 24)]
    content = write_corpus(tmp_path / "whole.arrow", texts, parts=4).read_bytes()
    for length in (*ends, *(end + 40 for end in ends[:-1])):
        (tmp_path / "cut.arrow").write_bytes(content[:length] + b"\x77" * 40 * (length in ends))
        good = [record.text for record in read(tmp_path / "cut.arrow") if not record.reason]
        assert len(good) >= 6 * sum(end <= length for end in ends)
        assert good == texts[: len(good)]


@pytest.mark.parametrize("parts", [1, 9])
@pytest.mark.parametrize(
    ("suffix", "is_cut"),
    # gzip tells of changed bytes at the end of a member, by its checksum
    [(".jsonl.zst", True), (".jsonl.zst", False), (".jsonl.gz", True)],
)
def test_a_damaged_compressed_file_gives_its_first_lines_and_the_same_ones_each_time(tmp_path, suffix, parts, is_cut):
    texts = documents(9000, words=80)
    content = bytearray(write_corpus(path := tmp_path / f"corpus{suffix}", texts, parts=parts).read_bytes())
    place = len(content) * 3 // 4
    content[place : None if is_cut else place + 99] = b"" if is_cut else bytes(99)
    path.write_bytes(content)
    *good, last = read(path)
    assert [record.text for record in good] == texts[: len(good)]
    lost = json_lines(texts[len(good) : 9000 * 3 // 4])
    assert len(lost) < 2 * 2**20  # what the decompressor loses
    assert is_damage(last)
    assert last.number == len(good) + 1
    for after in (0, 7, len(good)):
        assert read(path, after=after) == [*good[after:], last]


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz", ".parquet", ".arrow"])
def test_a_file_cut_short_is_always_noticed(tmp_path, suffix):
    whole = write_corpus(tmp_path / f"whole{suffix}", documents(30), parts=1).read_bytes()
    for length in range(0, len(whole), 97):
        (tmp_path / f"cut{suffix}").write_bytes(whole[:length])
        *good, last = read(tmp_path / f"cut{suffix}")
        assert is_damage(last)
        assert last.number == len(good) + 1


def test_a_broken_row_group_ends_a_parquet_file(tmp_path):
    path = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": documents(30)}), path, row_group_size=10, compression="gzip", use_dictionary=False)
    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    middle = group.data_page_offset + group.total_compressed_size // 2
    content[middle : middle + 50] = bytes(50)
    path.write_bytes(content)
    *good, last = read(path)
    assert [record.text for record in good] == documents(10)
    assert is_damage(last)
    assert last.number == 11
    assert read(path, after=10) == [last]
    assert read(path, after=11) == []


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz", ".parquet", ".arrow"])
def test_a_file_that_is_not_what_its_name_says_is_one_rejected_record(tmp_path, suffix):
    (tmp_path / f"corpus{suffix}").write_bytes(b"<!DOCTYPE html>\n<title>404</title>\n" * 9)
    (record,) = read(tmp_path / f"corpus{suffix}")
    assert record.number == 1
    assert is_damage(record)


@given(
    suffix=st.sampled_from(SUFFIXES),
    kind=st.sampled_from(["stream", "file"]),
    cut=st.floats(0, 1),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
    noise=st.none() | st.binary(max_size=200),
)
def test_damage_of_any_kind_is_rejected_or_not_seen(suffix, kind, cut, changes, noise):
    with tempfile.TemporaryDirectory() as folder:
        path = write_corpus(Path(folder) / f"corpus{suffix}", documents(30), parts=3)
        if suffix == ".arrow" and kind == "file":
            write_table(path, pa.table({"text": documents(30)}))
        damaged = bytearray(path.read_bytes() if noise is None else noise)
        damaged = damaged[: round(cut * len(damaged))]
        for place, byte in changes if damaged else []:
            damaged[int(place * len(damaged))] = byte
        path.write_bytes(damaged)
        try:
            records = read(path)
        except UserError:
            assert suffix in (*TABLES, ".tsv")  # the name of a column is damaged
            return
    assert all("\n" not in record.reason and len(record.reason) < 200 for record in records)
    assert [record.number for record in records] == sorted({record.number for record in records})
    for record in records:
        record.text.encode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: os.utime(path, ns=(0, 0)), "changed"),
        (lambda path: path.write_bytes(b""), "changed"),
        (lambda path: path.unlink(), "vanished"),
    ],
    ids=["touched", "emptied", "gone"],
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, suffix, change, said):
    path = write_corpus(tmp_path / f"corpus{suffix}", documents(9))
    if suffix == ".txt":
        path.write_text("text\n" * 9)
    (file,) = list_files((str(path),), cache=Path("unused"))
    records = read_records(file, form())
    next(records)
    change(path)
    for reader in (records, read_records(file, form())):
        with pytest.raises(UserError, match=rf"^{path}: {said} while it was read; want files that stay"):
            list(reader)
