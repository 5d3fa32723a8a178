"""Which files a corpus is, on this machine's disks."""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from corpora import write_corpus
from tokendrop.data.corpus.sources import SUFFIXES, SourceFile, check_unchanged, list_files
from tokendrop.errors import UserError


def files_of(*corpus: Path | str, key: str = "data.corpus") -> list[SourceFile]:
    return list_files(tuple(map(str, corpus)), cache=Path("unused"), key=key)


def names_of(*corpus: Path | str) -> list[str]:
    return [file.name for file in files_of(*corpus)]


def test_a_folder_a_glob_and_a_list_give_files_by_name_and_entries_as_given(tmp_path):
    for name in ("b.jsonl", "a.jsonl.zst", "sub/c.parquet", ".hidden/x.jsonl", "sub/.y.jsonl", "README.md"):
        write_corpus(tmp_path / name, [name])
    (tmp_path / "looks_like.parquet").mkdir()
    a, b, c = (str(tmp_path / name) for name in ("a.jsonl.zst", "b.jsonl", "sub/c.parquet"))
    assert names_of(tmp_path) == [a, b, c]
    assert names_of(f"{tmp_path}/*.jsonl*") == [a, b]
    assert names_of(f"{tmp_path}/**/*.parquet") == [c]
    assert names_of(tmp_path / "sub", tmp_path / "b.jsonl") == [c, b]
    assert names_of(tmp_path / "b.jsonl", tmp_path / "b.jsonl") == [b, b]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_folder_gives_all_that_can_be_read(tmp_path, suffix):
    path = write_corpus(tmp_path / f"corpus{suffix}", ["text"])
    assert names_of(tmp_path) == [str(path)]


@pytest.mark.parametrize("name", ["ünï 東京.jsonl", "a b.jsonl.zst", "part [1].jsonl", "100%.parquet", "a#b?.jsonl.gz"])
def test_names_may_hold_any_letters(tmp_path, name):
    path = write_corpus(tmp_path / "data of é" / name, ["text"])
    assert names_of(path) == [str(path)]


def test_a_name_that_is_no_text_is_refused_in_a_sentence(tmp_path):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")).write_bytes(b"")
    with pytest.raises(UserError, match=r"^data\.corpus: can't open "):
        files_of(tmp_path)


def test_a_relative_path_and_a_home_path_are_made_absolute(tmp_path, monkeypatch):
    write_corpus(tmp_path / "corpus.jsonl", ["text"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names_of("corpus.jsonl", "~/corpus.jsonl") == [str(tmp_path / "corpus.jsonl")] * 2


@pytest.mark.parametrize("entry", ["missing.jsonl", "empty_folder", "*.parquet", "notes.md", "*.md", "a.json.gz"])
def test_an_entry_that_matches_nothing_readable_is_named_with_its_key(tmp_path, entry):
    (tmp_path / "empty_folder").mkdir()
    for name in ("notes.md", "a.json.gz"):
        (tmp_path / name).write_text("notes")
    with pytest.raises(UserError, match=r"^data\.sources\[1\]\.corpus: .*want \.jsonl"):
        files_of(tmp_path / entry, key="data.sources[1].corpus")


def test_a_file_that_stays_as_it_is_can_be_known_by_another_process(tmp_path):
    (file,) = files_of(write_corpus(tmp_path / "corpus.jsonl", ["text"]))
    check_unchanged(pickle.loads(pickle.dumps(file)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes() + b"\n"), "changed"),
        (lambda path: os.utime(path, ns=(0, path.stat().st_mtime_ns + 1)), "changed"),
        (lambda path: path.unlink(), "vanished"),
    ],
    ids=["longer", "touched", "gone"],
)
def test_a_file_that_did_not_stay_as_it_was_is_named(tmp_path, change, said):
    path = write_corpus(tmp_path / "corpus.jsonl", ["text"])
    (file,) = files_of(path)
    change(path)
    with pytest.raises(UserError) as caught:
        check_unchanged(file)
    assert str(caught.value) == f"{path}: {said} while it was read; want files that stay as they are during preparation"


@pytest.mark.parametrize("entry", ["nul\0.jsonl", "half \ud800.jsonl", "ä" * 300 + ".jsonl", "d/" * 2100 + "a.jsonl"])
def test_a_name_that_no_system_call_takes_is_refused_in_a_sentence(tmp_path, entry):
    with pytest.raises(UserError, match=r"^data\.corpus: ") as said:
        files_of(tmp_path / entry)
    assert len(str(said.value).splitlines()) == 1
    assert str(said.value).isprintable()


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "broken link", "loop", "folder of a pipe"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "corpus.jsonl"
    entry = path
    if kind == "socket":
        path = entry = Path(tempfile.mkdtemp()) / "corpus.jsonl"  # whose names are short
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "broken link":
        path.symlink_to(tmp_path / "gone")
    elif kind == "loop":
        path.symlink_to(path)
    else:
        os.mkfifo(path)
        entry = tmp_path if kind == "folder of a pipe" else path
    with pytest.raises(UserError, match=r"^data\.corpus: can't open .* is (neither a file nor|no file)") as said:
        files_of(entry)
    assert str(path) in str(said.value)


def test_links_to_folders_are_not_followed_and_make_no_loop(tmp_path):
    (tmp_path / "corpus" / "below").mkdir(parents=True)
    (tmp_path / "corpus" / "a.jsonl").write_bytes(b"")
    (tmp_path / "corpus" / "below" / "up").symlink_to(tmp_path / "corpus")
    assert names_of(tmp_path / "corpus") == [str(tmp_path / "corpus" / "a.jsonl")]


HIDDEN = """
import os, sys
from pathlib import Path
from tokendrop.data.corpus.sources import list_files
os.setuid(65534)
list_files((sys.argv[1],), cache=Path("unused"))
"""


def test_a_folder_that_can_not_be_looked_into_is_named_and_not_left_out(tmp_path):
    if os.getuid():
        pytest.skip("another user is what root alone can be")
    corpus = Path(tempfile.mkdtemp())  # others may go through the folders above it
    corpus.chmod(0o755)
    (corpus / "a.jsonl").write_bytes(b"")
    (corpus / "shut").mkdir(mode=0o700)
    (corpus / "shut" / "b.jsonl").write_bytes(b"")
    done = subprocess.run([sys.executable, "-c", HIDDEN, str(corpus)], capture_output=True, text=True, check=False)
    assert f"data.corpus: can't open {corpus} ([Errno 13] Permission denied: '{corpus}/shut')" in done.stderr
