"""Corpora and a tiny job, written by the tests that need them."""

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
WORDS = (
    "the",
    "of",
    "and",
    "layer",
    "token",
    "random",
    "keep",
    "pile",
    "naïve",
    "東京",
    "Ωβ",
    "\u2028",
    "🚢",
)


def documents(count: int, *, words: int = 40, seed: int = 0) -> list[str]:
    """Different texts of so many words."""
    chance = random.Random(seed)
    return [f"{number} " + " ".join(chance.choices(WORDS, k=words)) for number in range(count)]


def json_lines(texts: Iterable[str], *, ascii_only: bool = True, end: str = "\n") -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=ascii_only) + end for text in texts).encode()


def write_corpus(path: Path, texts: Sequence[str], *, parts: int = 1, **spelling: object) -> Path:
    """The texts in the format that the name asks for, in so many frames, members, row groups or batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = max(1, -(-len(texts) // parts))
    chunks = [texts[first : first + size] for first in range(0, len(texts), size)] or [[]]
    if path.name.endswith(".parquet"):
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=size)
        return path
    if path.name.endswith(".arrow"):
        table = pa.table({"text": pa.array(texts, pa.string())})
        with pa.ipc.new_stream(path, table.schema) as out:
            out.write_table(table, max_chunksize=size)
        return path
    if path.suffix == ".tsv":
        path.write_text("text\n" + "".join(f"{text}\n" for text in texts), newline="")
        return path
    squeeze = {".zst": zstandard.compress, ".gz": gzip.compress}.get(path.suffix, bytes)
    path.write_bytes(b"".join(squeeze(json_lines(chunk, **spelling)) for chunk in chunks))
    return path


def byte_tokenizer(path: Path, *, end_of_text: str = END_OF_TEXT) -> Path:
    """A tokenizer.json of 257 tokens: the bytes and the end of text."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end_of_text])
    tokenizer.save(str(path))
    return path


def tiny_job(folder: Path, corpus: Sequence[Path | str], **branches: dict[str, object]) -> Path:
    """A job file for two steps of a very small GPT; all that it writes lies in `folder`/runs."""
    tree: dict[str, dict[str, object]] = {
        "model": {
            "kind": "gpt",
            "layers": 2,
            "width": 32,
            "heads": 2,
            "sequence_length": 32,
            "vocab_size": 320,
        },
        "data": {
            "corpus": [str(entry) for entry in corpus],
            "tokenizer_vocab_size": 300,
            "validation_share": 0.1,
            "folder": str(folder / "runs" / "data"),
        },
        "train": {"length": "2 steps", "global_batch": 4, "micro_batch": 2, "peak_lr": 1e-3},
        "scaling": {"cpus_per_worker": 1},
        "track": {"uri": None},
        "evaluate": {"sequences": 4},
    }
    for branch, keys in branches.items():
        tree[branch] = {**tree.get(branch, {}), **keys}
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump({"name": "tiny", "runs_folder": str(folder / "runs"), **tree}))
    return job
