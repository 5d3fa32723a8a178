"""Records of any size are read in little memory."""

import subprocess
import sys
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

PEAK = """
import re, sys
from pathlib import Path
from tokendrop.data.corpus.records import RecordForm, read_records
from tokendrop.data.corpus.sources import list_files

def peak():  # not getrusage, whose peak begins with that of the parent process
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024

form = RecordForm(text_key="text", subset_key="subset", only=frozenset(), max_document_bytes=int(sys.argv[2]))
(file,) = list_files((sys.argv[1],), cache=Path("unused"))
before = peak()
print(*((record.number, len(record.text), record.reason or "good") for record in read_records(file, form)), sep="\\n")
print(peak() - before)
"""


def read_and_peak(path: Path, limit: int) -> tuple[list[str], int]:
    """What is read by a process of its own, and the MiB by which it grows."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path), str(limit)], capture_output=True, text=True, check=True
    )
    *records, peak = done.stdout.splitlines()
    return records, int(peak)


def test_a_line_of_a_gigabyte_takes_little_memory(tmp_path):
    path = tmp_path / "corpus.jsonl.zst"
    some = zstandard.compress(b"x" * 2**24)
    ends = zstandard.compress(b'{"text": "first"}\n{"text": "'), zstandard.compress(b'"}\n{"text": "last"}\n')
    path.write_bytes(ends[0] + some * 64 + ends[1])
    records, peak = read_and_peak(path, 2**20)
    assert records == ["(1, 5, 'good')", "(2, 0, 'longer than 1048576 bytes')", "(3, 4, 'good')"]
    assert peak < 100


def test_a_large_row_group_takes_little_memory(tmp_path):
    path = tmp_path / "corpus.parquet"
    numbers = count()
    batch = [f"{next(numbers)} " + "x" * 2**16 for _ in range(256)]
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False, write_batch_size=16) as out:
        out.write_table(pa.table({"text": batch * 8}, schema=schema), row_group_size=2**20)
    assert pq.ParquetFile(path).num_row_groups == 1
    records, peak = read_and_peak(path, 2**20)
    assert len(records) == 2048
    assert peak < 100
