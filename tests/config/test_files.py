"""Files that are no jobs, keys that stand twice, trees that outgrow their text, paths that nothing could have."""

import json
import os
import socket
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.track.run_folder import begun_run, create_run_folder

LEVELS = [(name, ", ".join([f"*{below}"] * 9)) for below, name in pairwise("abcdefghi")]
ALIASES = ", ".join(f"{name}: &{name} [{below}]" for name, below in LEVELS)
MERGES = ", ".join(f"{name}: &{name} {{<<: [{below}]}}" for name, below in LEVELS)


def refusal(path: Path, *overrides: str) -> str:
    """Why a job is refused: in one sentence, soon."""
    since, worked = time.monotonic(), time.process_time()
    with pytest.raises(UserError) as caught:
        load_job(path, overrides)
    assert time.process_time() - worked < 10
    assert time.monotonic() - since < 60  # nothing is waited for
    sentence = str(caught.value)
    assert sentence.isprintable()
    assert len(sentence) < 600
    return sentence


# --- keys that stand twice ---


def test_a_key_that_stands_twice_is_refused_by_both_lines(tmp_path: Path, job: Path) -> None:
    for text, key, lines in (
        ("name: a\nseed: 1\nname: b\n", "name", (1, 3)),
        ("train:\n  peak_lr: 1\n  'peak_lr': 2\n", "peak_lr", (2, 3)),
        ("data: {corpus: [a],\n  sources: [{name: a,\n name: a}]}\n", "name", (2, 3)),
        ("<<: {seed: 1}\nname: a\n<<: {seed: 2}\n", "<<", (1, 3)),
    ):
        (tmp_path / "twice.yaml").write_text(text)
        said = refusal(tmp_path / "twice.yaml")
        assert f"the key '{key}' stands twice, in line {lines[0]} and in line {lines[1]}" in said
        (tmp_path / "above.yaml").write_text("base: twice.yaml\n")
        assert said == refusal(tmp_path / "above.yaml")
        (tmp_path / "profile.yaml").write_text(text)
        assert "stands twice" in refusal(job, f"scaling.profile={tmp_path / 'profile.yaml'}")
    assert "the key 'uri' stands twice" in refusal(job, "track={uri: null, uri: x}")


def test_merge_keys_and_aliases_mean_what_they_mean_in_yaml(tmp_path: Path, job: Path) -> None:
    (tmp_path / "merged.yaml").write_text(
        job.read_text().replace("base: base.yaml", f"base: {job.parent / 'base.yaml'}")
        + "evaluate: &every {every: 3 steps, sequences: 5}\ncheckpoint: {<<: {every: 3 steps, keep: 2}, keep: 7}\n"
    )
    config = load_job(tmp_path / "merged.yaml")
    assert (config.evaluate.sequences, config.checkpoint.keep, str(config.checkpoint.every)) == (5, 7, "3 steps")


# --- trees that outgrow their text ---


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{{a: &a {{k: 1}}, {ALIASES}}}", "it holds more than 100,000 values"),
        (f"{{a: &a {{k: 1}}, {MERGES}}}", "it holds more than 100,000 values"),
        ("[" * 200_000, "nested too deeply"),
        ("- " * 1400 + "a", "nested too deeply"),
        ("&a [*a]", "a branch of it holds itself"),
        ("{name: &a {b: [*a]}}", "a branch of it holds itself"),
    ],
    ids=["aliases", "merge keys", "brackets", "indents", "itself", "itself below"],
)
def test_a_tree_without_end_is_refused_at_once(tmp_path: Path, job: Path, text: str, says: str) -> None:
    (tmp_path / "endless.yaml").write_text(text)
    assert says in refusal(tmp_path / "endless.yaml")
    assert says in refusal(job, f"drop={text}")


# --- files that are none ---


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def listener(path: Path) -> Path:
    socket.socket(socket.AF_UNIX).bind(str(path))
    return path


def large(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(11 * 10**6)
    return path


NO_FILES: dict[str, Callable[[Path], Path]] = {
    "pipe": fifo,
    "socket": listener,
    "device": lambda path: Path("/dev/zero"),
    "terminal": lambda path: Path("/dev/stdin"),
    "large": large,
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_regular_file_is_refused_without_a_look_into_it(
    tmp_path: Path, job: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket wants a short path
    path = NO_FILES[kind](Path("x.yaml"))
    says = "can't read this job file (want a regular file of at most 1048576 bytes)"
    assert refusal(path) == f"{path}: {says}"
    (tmp_path / "above.yaml").write_text(f"base: {path.absolute()}\n")
    assert says in refusal(tmp_path / "above.yaml")
    if path.suffix == ".yaml":
        assert refusal(job, f"scaling.profile={path}").endswith(says.replace("job file", "device profile"))


def test_a_folder_in_the_place_of_a_file_is_refused_with_a_file_of_it(tmp_path: Path, job: Path) -> None:
    folder = tmp_path / "jobs.yaml"
    (folder / "below").mkdir(parents=True)
    assert refusal(folder) == f"{folder}: this is a folder; want a job file (.yaml)"
    (folder / "below" / "a.yaml").touch()
    assert refusal(folder).endswith(f"want a job file such as {folder / 'below' / 'a.yaml'}")
    (folder / "b.yaml").touch()
    assert refusal(folder).endswith(f"want a job file such as {folder / 'b.yaml'}")
    profile = refusal(job, f"scaling.profile={folder}")
    assert profile.endswith(f"this is a folder; want a device profile such as {folder / 'b.yaml'}")


def test_a_run_folder_in_the_place_of_a_job_is_told_what_to_do_with(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    said = refusal(tmp_path)
    assert said.startswith(f"{tmp_path}: this is a folder; {tmp_path / 'job.yaml'} is the job of this run, 'tokendrop")
    assert f"'tokendrop train --resume {tmp_path}' goes on with the run" in said
    assert said.endswith("; 'tokendrop runs diff RUN RUN' compares two")


# --- paths and names ---

NOWHERE = {"NUL": "a\0b", "half of a character": "a\ud800b", "a long name": "n" * 300, "a long path": "n/" * 3000}


@pytest.mark.parametrize("name", NOWHERE.values(), ids=NOWHERE)
def test_a_path_that_nothing_could_have_is_refused(tmp_path: Path, job: Path, name: str) -> None:
    assert refusal(Path(name)).count("can't read this job file (want a path ") == 1
    for key in ("runs_folder", "data.folder", "data.tokenizer"):
        value = json.dumps(name)
        assert f"{key.rpartition('.')[2]}: want " in refusal(job, f"{key}={value}")
    assert "want " in refusal(job, f"scaling.profile={json.dumps(f'{name}.yaml')}")


@pytest.mark.parametrize("key", ["data.tokenizer", "data.cache.folder"])
def test_a_uri_is_no_folder_of_this_machine(job: Path, key: str) -> None:
    said = refusal(job, f"{key}=s3://key:secret@bucket/runs")
    assert "want a path that all workers share, no URI, got s3://<hidden>@bucket/runs" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["data.folder=s3://key:secret@bucket/x"],
            "data.folder: want credentials in the environment of the nodes, got s3://<hidden>@bucket/x",
        ),
        (
            ["runs_folder=s3://key:secret@bucket/x"],
            "runs_folder: want credentials in the environment of the nodes, got s3://<hidden>@bucket/x",
        ),
        *(
            (
                [f"runs_folder={address}"],
                "runs_folder: want a path that all workers share, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, got "
                + address,
            )
            for address in ("http://host/runs", "s3://", "gs:///runs")
        ),
        (
            ["data.folder=s3://bucket/x", "data.reader=ray_data"],
            "data.reader: 'ray_data' reads from a folder, not from s3://bucket/x; want memory_map, with which each node"
            " reads a store through its cache",
        ),
        (
            ["data.cache.folder=shards"],
            "data.cache.folder: want a path from / or ~ on, the same on each node, got shards",
        ),
        (["data.cache.max_bytes=0"], "data.cache.max_bytes: want at least 1, got 0"),
    ],
)
def test_a_store_is_read_without_credentials_in_the_job_and_through_a_cache(
    job: Path, settings: list[str], said: str
) -> None:
    assert refusal(job, *settings) == f"{job}: {said}"


@pytest.mark.parametrize("key", ["name", "run"])
@pytest.mark.parametrize("name", ["..", ".", "a/b", "a\\nb", "a\\n", "a b", "", "a\\0b", "a:b", "x" * 201, "Ω" * 101])
def test_a_name_is_the_name_of_one_folder(job: Path, key: str, name: str) -> None:
    assert f"{key}: want " in refusal(job, f'{key}="{name}"')


def test_names_of_any_script_are_names(job: Path, tmp_path: Path) -> None:
    for name in ("東京", "Ω.1", "x" * 200, "Ω" * 100):
        config = load_job(job, [f"run={name}", f"name={name}", f"runs_folder={tmp_path}"])
        assert create_run_folder(config) == tmp_path / name


def test_a_link_out_of_the_folder_of_runs_is_not_followed(tmp_path: Path, job: Path) -> None:
    (tmp_path / "runs").mkdir()
    for link, target in (("out", "/"), ("above", ".."), ("loop", "loop"), ("nowhere", "../nowhere")):
        (tmp_path / "runs" / link).symlink_to(target)
        config = load_job(job, [f"run={link}", f"runs_folder={tmp_path}/runs"])
        for use in (begun_run, create_run_folder):
            with pytest.raises(UserError, match=rf"^run: {tmp_path}/runs/{link} (leads out of runs_folder|is a link)"):
                use(config)
    (tmp_path / "runs" / "real").mkdir()
    (tmp_path / "runs" / "latest").symlink_to("real")
    (tmp_path / "elsewhere").symlink_to("runs")
    config = load_job(job, ["run=latest", f"runs_folder={tmp_path}/elsewhere"])
    assert begun_run(config) is None
    assert create_run_folder(config) == tmp_path / "elsewhere" / "latest"
