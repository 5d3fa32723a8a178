"""Corpora behind URIs: a real S3 server on this machine, and file://."""

import logging
import os
from pathlib import Path
from urllib.parse import quote

import pyarrow.fs as pafs
import pytest
from moto.server import ThreadedMotoServer

from corpora import write_corpus
from tokendrop.data.sources import list_files, read_documents
from tokendrop.errors import UserError

NAMES = [
    "part-10.jsonl",
    "part-2.jsonl",
    "a.jsonl",
    "a.jsonl.zst",
    "b c/é#1.jsonl.gz",
    "b c/[2].parquet",
    "deep/er/d.jsonl",
    "notes.md",
    ".hidden/x.jsonl",
    "deep/.y.jsonl",
]
ENTRIES = [
    "",
    "/a.jsonl",
    "/*.jsonl",
    "/*.jsonl*",
    "/part-*",
    "/[ab].jsonl",
    "/**/*.jsonl",
    "/**/*.parquet",
    "/b c/*",
    "/b c/[2].parquet",
    "/*/er/*.jsonl",
    "/deep",
    "/deep/**/*.jsonl",
]


@pytest.fixture(scope="module")
def s3():
    """The query that leads a URI to the server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"?endpoint_override={host}%3A{port}&scheme=http&allow_bucket_creation=true"
    server.stop()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, s3):
    """The same files in a folder and in a bucket."""
    folder = tmp_path_factory.mktemp("local") / "corpus"
    store, _ = pafs.FileSystem.from_uri(f"s3://key:secret@bucket{s3}")
    store.create_dir("bucket")
    for name in NAMES:
        write_corpus(folder / name, [name])
        with store.open_output_stream(f"bucket/corpus/{name}", compression=None) as out:
            out.write((folder / name).read_bytes())
    return folder


def read(entry: str) -> list[str]:
    files = list_files((entry,), cache=Path("unused"))
    return [text for file in files for text in read_documents(file, "text")]


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_store_gives_the_same_documents_in_the_same_order(corpus, s3, entry):
    here = read(f"{corpus}{entry}")
    assert here
    assert read(f"s3://key:secret@bucket/corpus{entry}{s3}") == here
    assert read(f"file://{corpus}{entry}") == here


def test_a_uri_may_be_percent_encoded_or_not(corpus, s3):
    name = "b c/é#1.jsonl.gz"
    assert read(f"s3://key:secret@bucket/corpus/{name}{s3}") == [name]
    assert read(f"s3://key:secret@bucket/corpus/{quote(name)}{s3}") == [name]
    assert read(f"file://{quote(str(corpus / name))}") == [name]


@pytest.mark.parametrize(
    "place", ["bucket/nothing", "bucket/*.parquet", "no-such-bucket/x.jsonl", "bucket/corpus/notes.md"]
)
def test_what_is_missing_in_a_store_is_named_without_the_secret(corpus, s3, place):
    with pytest.raises(UserError, match=rf"^data\.corpus: .*s3://{place.replace('*', '.')}") as caught:
        read(f"s3://key:secret@{place}{s3}")
    assert "secret" not in str(caught.value)


def test_files_are_known_by_a_name_without_the_secret(corpus, s3):
    (file,) = list_files((f"s3://key:secret@bucket/corpus/a.jsonl{s3}",), cache=Path("unused"))
    assert file.name == "s3://bucket/corpus/a.jsonl"
    assert file.size == os.path.getsize(corpus / "a.jsonl")


def test_a_damaged_object_is_named(corpus, s3):
    store, _ = pafs.FileSystem.from_uri(f"s3://key:secret@bucket{s3}")
    with store.open_output_stream("bucket/damaged.jsonl.zst", compression=None) as out:
        out.write((corpus / "a.jsonl.zst").read_bytes()[:-3])
    with pytest.raises(UserError, match=r"^s3://bucket/damaged\.jsonl\.zst: can't read this file"):
        read(f"s3://key:secret@bucket/damaged.jsonl.zst{s3}")
