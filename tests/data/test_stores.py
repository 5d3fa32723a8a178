"""Corpora behind URIs: a real S3 server and a web server on this machine, fsspec's memory, and file://."""

import logging
import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import fsspec
import pyarrow.fs as pafs
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer

from corpora import documents, write_corpus
from tokendrop.data.corpus.records import Record, RecordForm, read_records
from tokendrop.data.corpus.sources import list_files
from tokendrop.errors import UserError

NAMES = [
    "part-10.jsonl",
    "part-2.jsonl",
    "a.jsonl",
    "a.jsonl.zst",
    "b c/é#1.jsonl.gz",
    "b c/[2].parquet",
    "b c/3.arrow",
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
FORM = RecordForm(text_key="text", subset_key="subset", only=frozenset(), max_document_bytes=2**20)


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
def bucket(s3):
    """The store that holds `bucket`."""
    store, _ = pafs.FileSystem.from_uri(f"s3://key:secret@bucket{s3}")
    store.create_dir("bucket")
    return store


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, bucket):
    """The same files in a folder, in a bucket and in memory."""
    folder = tmp_path_factory.mktemp("local") / "corpus"
    for name in NAMES:
        content = write_corpus(folder / name, [name]).read_bytes()
        put(bucket, f"bucket/corpus/{name}", content)
        fsspec.filesystem("memory").pipe(f"/corpus/{name}", content)
    return folder


@pytest.fixture(scope="module")
def web(corpus):
    """The address of a server of that folder."""

    class SilentHandler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SilentHandler, directory=str(corpus))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def put(store: pafs.FileSystem, path: str, content: bytes) -> None:
    with store.open_output_stream(path, compression=None) as out:
        out.write(content)


def read(entry: str) -> list[str]:
    records = [record for file in files_of(entry) for record in read_records(file, FORM)]
    assert {record.reason for record in records} == {""}
    return [record.text for record in records]


def files_of(entry: str):
    return list_files((entry,), cache=Path("unused"))


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_store_gives_the_same_documents_in_the_same_order(corpus, s3, entry):
    here = read(f"{corpus}{entry}")
    assert here
    assert read(f"s3://key:secret@bucket/corpus{entry}{s3}") == here
    assert read(f"file://{corpus}{entry}") == here
    assert read(f"memory://corpus{entry}") == here


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "part-2.jsonl"])
def test_a_web_address_is_a_store_of_one_file(corpus, web, name):
    assert read(f"{web}/{name}?signature=secret") == [name]
    (file,) = files_of(f"{web}/{name}?signature=secret")
    assert file.name == f"{web}/{name}"


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


@pytest.mark.parametrize(
    "entry",
    [
        "s3://key:sec/ret@bucket/x.jsonl",
        "gopher://user:secret@host/corpus.jsonl",
        "nothing://secret@host/corpus.jsonl",
        "http://user:secret@127.0.0.1:9/corpus.jsonl?token=secret",
        "gs://secret@bucket/x.jsonl?endpoint_override=127.0.0.1:9&scheme=http&retry_limit_seconds=0.1",
    ],
)
def test_a_store_out_of_reach_is_named_without_the_secret(entry):
    with pytest.raises(UserError, match=rf"^data\.corpus: .*{entry.partition(':')[0]}://.*jsonl") as caught:
        files_of(entry)
    assert "\n" not in str(caught.value)
    assert "sec" not in str(caught.value)


def test_a_store_whose_package_is_missing_names_the_command_that_installs_it():
    fsspec.register_implementation("remote", "no_such_store.files.Store", clobber=True)
    with pytest.raises(UserError) as caught:
        files_of("remote://user:secret@host/x.jsonl")
    assert str(caught.value) == (
        "data.corpus: can't open remote://host/x.jsonl: want a package for it: pip install no_such_store"
    )


def test_files_are_known_by_a_name_without_the_secret(corpus, s3):
    (file,) = files_of(f"s3://key:secret@bucket/corpus/a.jsonl{s3}")
    assert file.name == "s3://bucket/corpus/a.jsonl"
    assert file.size == os.path.getsize(corpus / "a.jsonl")
    (file,) = files_of("memory://corpus/a.jsonl")
    assert file.name == "memory://corpus/a.jsonl"


@pytest.mark.parametrize("store", ["s3", "memory"])
def test_a_damaged_object_gives_the_records_that_the_same_file_gives_here(tmp_path, bucket, s3, store):
    path = write_corpus(tmp_path / "damaged.jsonl.zst", texts := documents(5000))
    path.write_bytes(content := path.read_bytes()[:-3])
    (here,), (there,) = files_of(str(path)), files_of(uri_of(store, path.name, s3, bucket, content))
    *good, last = read_records(there, FORM)
    assert [*good, last] == list(read_records(here, FORM))
    assert good == [Record(number, text, "") for number, text in enumerate(texts[: len(good)], start=1)]
    assert len(good) > 2500
    assert last == Record(len(good) + 1, "", "", "damaged or cut short from here on (Truncated compressed stream)")


@pytest.mark.parametrize("store", ["s3", "memory"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".parquet", ".arrow"])
def test_an_object_that_changes_while_it_is_read_is_named(tmp_path, bucket, s3, store, suffix):
    content = write_corpus(tmp_path / f"x{suffix}", documents(20)).read_bytes()
    uri = uri_of(store, f"changing{suffix}", s3, bucket, content)
    (file,) = files_of(uri)
    records = read_records(file, FORM)
    next(records)
    uri_of(store, f"changing{suffix}", s3, bucket, content + b"\n")
    with pytest.raises(UserError, match=rf"changing\{suffix}: changed while it was read; want files that stay"):
        list(records)
    if store == "s3":
        bucket.delete_file(f"bucket/changing{suffix}")
    else:
        fsspec.filesystem("memory").rm(f"/changing{suffix}")
    with pytest.raises(UserError, match=rf"changing\{suffix}: vanished while it was read; want files that stay"):
        list(read_records(file, FORM))


def uri_of(store: str, name: str, s3: str, bucket: pafs.FileSystem, content: bytes) -> str:
    """An object with that content."""
    if store == "s3":
        put(bucket, f"bucket/{name}", content)
        return f"s3://key:secret@bucket/{name}{s3}"
    fsspec.filesystem("memory").pipe(f"/{name}", content)
    return f"memory://{name}"


class Breaking(MemoryFileSystem):
    """A store that is lost after the first bytes of each file."""

    protocol = "breaking"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("breaking://"))

    def _open(self, path, mode="rb", **keys):
        file = super()._open(path, mode, **keys)
        read = type(file).read

        class Lost(type(file)):
            def read(self, *size):
                if self.tell() > 40:
                    raise RuntimeError("connection reset by user:secret@host ://user:secret@host")
                return read(self, min(64, *size))

        lost = Lost(self, path, file.getvalue())
        lost.seek(0)
        return lost


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".arrow", ".txt"])
def test_a_store_that_fails_is_no_damage_of_the_file(tmp_path, suffix):
    fsspec.register_implementation("breaking", Breaking, clobber=True)
    fsspec.filesystem("memory").pipe(f"/x{suffix}", write_corpus(tmp_path / f"x{suffix}", documents(99)).read_bytes())
    (file,) = files_of(f"breaking://x{suffix}")
    with pytest.raises(UserError, match=rf"^can't read breaking://x\{suffix} \(connection reset"):
        list(read_records(file, FORM))
