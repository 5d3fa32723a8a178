"""What a manifest may say: names that stay in its folder, numbers that can be; and advice that is safe."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from folders import Document, bytes_of, write_folder
from tokendrop.cli.main import main
from tokendrop.data.read.inspection import count_tokens
from tokendrop.data.read.row_reader import Rows
from tokendrop.data.shards.files import check_files
from tokendrop.data.shards.format import MANIFEST, SHARDS, SPLITS, TOKENIZER
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import DamagedDataError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "0123456789abcdef"
    texts = [Document([n] * 5, split=SPLITS[n % 7 == 6], subset="ab"[n % 2]) for n in range(1, 60)]
    write_folder(folder, [("web", texts[:40]), ("books", texts[40:])], rows_per_shard=16)
    return folder


FIRST = np.zeros(1, np.int64)
AWAY = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/web-train-00000.arrow",
    "web-train-00000.arrow\0",
    "",
    ".",
    "..",
    "ä" * 300,
]


@pytest.mark.parametrize("name", AWAY)
def test_a_shard_whose_name_leads_away_is_refused(whole, tmp_path, name):
    folder = copy_of(whole, tmp_path / "wrong")
    change_line(folder, 0, file=name)
    with pytest.raises(DamagedDataError) as refused:
        read_manifest(folder)
    said = str(refused.value)
    assert re.match(rf"{folder / SHARDS}: damaged \(line 1(\.file)?: want ", said)
    assert "; remove" not in said
    assert said.isprintable()


def test_a_source_whose_name_leads_away_is_refused(whole, tmp_path):
    folder = copy_of(whole, tmp_path / "wrong")
    tree = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**tree, "sources": ["../web", "books"]}))
    with pytest.raises(DamagedDataError, match=r"manifest\.json: damaged \(sources: want different names of letters"):
        read_manifest(folder)


WRONG_KEYS = {
    "kind": ["pictures", 1],
    "sequence_length": [-1, 10**30, 2**63, 1e400, 1.5, True, "many", None, [1], {"a": 1}],
    "row_length": [0],
    "tokenizer_sha256": [1, None, "\udc00"],
    "sources": [None, "web", ["web", 1], ["web", None], [["web"]], {}, []],
    "files": [None, [None]],
    "is_complete": [1, "yes", None],
    "rows": [[-1], ["many"], [None], [True], 5],
    "subsets": [[1], [None], [{}], {"a": 1}, [{"subset": 1, "documents": 1, "tokens": 1, "bytes": 1}]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG_KEYS.items() for value in values])
def test_a_wrong_value_in_the_header_is_told_by_its_key(whole, tmp_path, key, value):
    folder = copy_of(whole, tmp_path / "wrong")
    tree = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**tree, key: value}))
    with pytest.raises(DamagedDataError, match=rf"manifest\.json: damaged \({key}: want ") as refused:
        read_manifest(folder)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("key", ["kind", "files", "rows", "subsets"])
def test_a_key_that_is_missing_is_told(whole, tmp_path, key):
    folder = copy_of(whole, tmp_path / "wrong")
    tree = json.loads((folder / MANIFEST).read_text())
    tree.pop(key)
    (folder / MANIFEST).write_text(json.dumps(tree))
    with pytest.raises(DamagedDataError, match=rf"manifest\.json: damaged \({key}: "):
        read_manifest(folder)
    folder = copy_of(whole, tmp_path / "line")
    change_line(folder, 2, rowz=json.loads((folder / SHARDS).read_text().splitlines()[2]).pop("rows"), rows=None)
    with pytest.raises(DamagedDataError, match=r"shards\.jsonl: damaged \(line 3: rows: "):
        read_manifest(folder)


@pytest.mark.parametrize("content", [b"[]", b"1", b"{", b"\xff", b"[" * 100_000, b"null", b""])
def test_a_header_that_is_no_json_object_is_one_sentence(whole, tmp_path, content):
    folder = copy_of(whole, tmp_path / "wrong")
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(DamagedDataError, match=r"manifest\.json: damaged \(") as refused:
        read_manifest(folder)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", [MANIFEST, SHARDS, TOKENIZER, "web-train-00000.arrow"])
def test_what_is_no_file_or_a_link_that_leads_out_is_refused_at_once(whole, tmp_path, name):
    for number, put in enumerate((os.mkfifo, Path.mkdir)):
        folder = copy_of(whole, tmp_path / str(number))
        (folder / name).unlink()
        put(folder / name)
        with pytest.raises(DamagedDataError, match=rf"{name}: damaged"):
            check_files(folder, read_manifest(folder))
    folder = copy_of(whole, tmp_path / "link")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    if name.endswith(".arrow"):
        for look in (lambda: check_files(folder, read_manifest(folder)), lambda: Rows(folder, "train").read(FIRST)):
            with pytest.raises(DamagedDataError, match=rf"{name}: damaged \(a link to {tmp_path}/elsewhere"):
                look()


@pytest.mark.parametrize("number", [10**30, -1, 2**63, 1e400, 1.5, True, "many", None, [1], {"a": 1}])
@pytest.mark.parametrize("key", ["rows", "bytes", "next", "subsets"])
def test_a_number_that_can_not_be_is_named(whole, tmp_path, key, number):
    folder = copy_of(whole, tmp_path / "wrong")
    count = {"next": {"file": number, "record": 1, "token": 0, "seen": 0}}
    count["subsets"] = [{"subset": "a", "documents": number, "tokens": 1, "bytes": 1}]
    change_line(folder, 1, **{key: count.get(key, number)})
    with pytest.raises(DamagedDataError, match=r"shards\.jsonl: damaged \(line 2"):
        count_tokens(folder)


def test_advice_to_remove_a_folder_is_given_for_one_that_preparation_made_alone(whole, tmp_path):
    for name, is_ours in (("0123456789abcdef", True), ("etc", False), ("0123456789abcdef0", False)):
        folder = copy_of(whole, tmp_path / name)
        (folder / SHARDS).write_text("{\n")
        with pytest.raises(DamagedDataError) as said:
            read_manifest(folder)
        assert (f"; remove {folder} and prepare the data again" in str(said.value)) == is_ours
        assert ("; remove" in str(said.value)) == is_ours
    (tmp_path / "fedcba9876543210").mkdir()  # of somebody else's
    with pytest.raises(DamagedDataError) as said:
        read_manifest(tmp_path / "fedcba9876543210")
    assert "; remove" not in str(said.value)


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    assert bytes_of(to) == bytes_of(folder)
    return to


def change_line(folder: Path, number: int, **keys: object) -> None:
    lines = (folder / SHARDS).read_text().splitlines()
    lines[number] = json.dumps({**json.loads(lines[number]), **keys})
    (folder / SHARDS).write_text("".join(line + "\n" for line in lines))


@pytest.mark.parametrize("file", [MANIFEST, SHARDS])
@pytest.mark.parametrize("verb", [["show", "--sample", "0"], ["stats"], ["verify"]], ids=lambda verb: verb[0])
def test_a_command_on_damaged_shards_ends_with_1_and_one_line(whole, tmp_path, capsys, file, verb):
    folder = copy_of(whole, tmp_path / "wrong")
    (folder / file).write_bytes(b"{}\n")
    with pytest.raises(SystemExit) as ended:
        main(["data", verb[0], str(folder), *verb[1:]])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, len(said.err.splitlines())) == (1, "", 1)
    assert f"{folder / file}: damaged (" in said.err
