"""Files that are damaged as disks, networks and people damage them, the same for the same seed."""

import io
import random

import pyarrow as pa
import pyarrow.parquet as pq

from corpora import documents

TEXTS = documents(6, words=4)
_WORDS = (b"\0" * 4, b"\xff" * 4, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\1\0\0\0")
_LONGS = (b"\0" * 8, b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\0" * 7 + b"\x40", b"\xff" * 4 + b"\0" * 4)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """A few bytes flipped, set to numbers that matter, copied elsewhere, or an end that is gone."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        place, kind = chance.randrange(max(1, len(changed))), chance.randrange(6)
        if not changed:
            break
        if kind == 0:
            changed[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            changed[place & ~3 : (place & ~3) + 4] = chance.choice(_WORDS)
        elif kind == 3:
            changed[place & ~7 : (place & ~7) + 8] = chance.choice(_LONGS)
        elif kind == 4:
            other, length = chance.randrange(len(changed)), chance.randrange(1, 9)
            changed[place : place + length] = changed[other : other + length]
        elif chance.random() < 0.2:
            del changed[place:]
    return bytes(changed)


def tables() -> list[pa.Table]:
    """The same texts in the types that text may have, with columns of other types beside them."""
    texts = pa.array(TEXTS)
    ends = pa.array([3, 6], pa.int32())
    return [
        pa.table({"text": texts}),
        pa.table({"text": texts.cast(pa.string_view())}),
        pa.table({"text": texts.dictionary_encode()}),
        pa.table({"text": texts, "meta": [{"pile_set_name": "x", "counts": [1, 2]}] * 6}),
        pa.table({"text": texts, "runs": pa.RunEndEncodedArray.from_arrays(ends, pa.array(["a", "b"]))}),
    ]


def arrow_files() -> list[bytes]:
    """Streams and files, packed and not."""
    found: list[bytes] = []
    for table in tables():
        for new, packed in ((pa.ipc.new_stream, "zstd"), (pa.ipc.new_stream, None), (pa.ipc.new_file, None)):
            out = io.BytesIO()
            with new(out, table.schema, options=pa.ipc.IpcWriteOptions(compression=packed)) as writer:
                writer.write_table(table)
            found.append(out.getvalue())
    return found


def parquet_files() -> list[bytes]:
    found: list[bytes] = []
    for table in tables()[:1] + tables()[2:4]:
        for how in ({}, {"use_dictionary": False, "compression": "zstd"}, {"data_page_version": "2.0"}):
            out = io.BytesIO()
            pq.write_table(table, out, **how)
            found.append(out.getvalue())
    return found
