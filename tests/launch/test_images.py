"""A ViT from images to timm: prepared in several forms, trained on Ray, resized, evaluated, exported, finetuned."""

import json
from collections import Counter
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
import yaml

from images import CLASSES, MODEL, PIXELS, TASK, file_of, image_of, write_archive
from runs import FLOAT64, losses
from tokendrop.cli.main import main
from tokendrop.config.load import load_job
from tokendrop.data.prepare.pipeline import prepare
from tokendrop.data.read.row_reader import Rows
from tokendrop.data.shards.format import Split
from tokendrop.data.shards.manifest import read_manifest
from tokendrop.errors import DamagedDataError, UserError
from tokendrop.evaluate.load import load_run
from tokendrop.track.audit import audit
from tokendrop.track.journal import read_ledger

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

COUNT = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in folders of their classes, and in a table beside their held-out ones."""
    folder = tmp_path_factory.mktemp("images")
    files = [file_of(image_of(number)) for number in range(COUNT)]
    for number, file in enumerate(files):
        (folder / "train" / CLASSES[number % 3]).mkdir(parents=True, exist_ok=True)
        (folder / "train" / CLASSES[number % 3] / f"{number:02}.png").write_bytes(file)
    for name, numbers in (("train", range(COUNT)), ("test", range(COUNT, COUNT + 13))):
        table = {"image": [file_of(image_of(n)) for n in numbers], "label": [CLASSES[n % 3] for n in numbers]}
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    return folder


def write_job(folder: Path, name: str, **changes: Any) -> Path:
    tree = {
        "name": name,
        "run": name,
        "runs_folder": str(folder / "runs"),
        "task": {**TASK, "labels": [*CLASSES]},
        "model": MODEL,
        "data": {
            "corpus": [str(folder / "train.parquet")],
            "validation_corpus": [str(folder / "test.parquet")],
            **{"rows_per_shard": 16, "folder": str(folder / "data")},
        },
        "train": {
            **{"length": "3 epochs", "global_batch": 8, "micro_batch": 2, "peak_lr": 5e-3, "precision": "fp64"},
        },
        "drop": {
            "method": "random_ltd",
            "schedule": {"kind": "linear", "start": 5, "until": "2 epochs", "increment": 4},
        },
        "scaling": {"cpus_per_worker": 1},
        "checkpoint": {"every": "1 epochs"},
        "evaluate": {"every": "1 epochs"},
        "track": {"uri": None},
    }
    for key, value in changes.items():
        branch, _, leaf = key.partition("__")
        tree[branch] = {**tree[branch], leaf: value} if leaf else value
    job = folder / f"{name}.yaml"
    job.write_text(yaml.safe_dump(tree))
    return job


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    main(["train", str(write_job(folder, "whole"))])
    return folder / "runs" / "whole"


@pytest.mark.long
def test_each_epoch_has_each_image_once_and_held_out_ones_are_judged(run: Path, capsys) -> None:
    steps = ceil(3 * COUNT / 8)
    counts = Counter(sample for row in read_ledger(run) for sample in row["sample_ids"])
    assert len(counts) == 8 * steps  # ids tell epochs apart
    assert Counter(sample % 2**36 for sample in counts).keys() == set(range(COUNT))
    assert audit(run).is_clean
    main(["evaluate", str(run), "--json"])
    found = json.loads(capsys.readouterr().out)["validation"]
    assert found["rows"] == 13
    assert found["top1"] > 0.6  # a colour for each class
    assert found["top5"] == 1.0


def samples_of(place: Path, split: Split = "train") -> list[tuple[bytes, str]]:
    """The images of prepared shards with the names of their classes, in an order of their own."""
    rows = Rows(place, split)
    ids = np.arange(rows.committed.rows[0])
    numbers = rows.read(ids)
    names = json.loads((place / "tokenizer.json").read_text())["model"]["vocab"]
    name_of = {number: name for name, number in names.items()}
    checksums = numbers[:, 2].astype(np.uint64) | numbers[:, 3].astype(np.uint64) << np.uint64(32)
    files = rows.image_files(ids, checksums)
    return sorted((file, name_of[label]) for file, label in zip(files, numbers[:, 1].tolist(), strict=True))


@pytest.mark.long
def test_a_folder_of_a_class_each_is_the_same_data_in_another_order(folder: Path, run: Path) -> None:
    job = load_job(write_job(folder, "folders", task=TASK, data__corpus=[str(folder / "train")]))
    found, table = prepare(job), prepare(load_job(run / "job.yaml"))
    assert samples_of(found) == samples_of(table)
    assert read_manifest(found).header.files[1:] == (f"{folder / 'train'}/ part 1 of 1",)


@pytest.mark.long
@pytest.mark.parametrize("labels", [[*CLASSES], []], ids=["names", "numbers"])
def test_archives_have_the_samples_of_the_folder_of_their_images(
    folder: Path, tmp_path: Path, labels: list[str]
) -> None:
    """Its classes are numbered by name where the job does not say their order, as in WebDataset's .cls."""
    files = [(path.read_bytes(), path.parent.name) for path in sorted((folder / "train").rglob("*.png"))]
    spelled = {name: name if labels else str(number) for number, name in enumerate(sorted(CLASSES))}
    for part, first in enumerate(range(0, COUNT, 20)):
        samples = [(file, spelled[name]) for file, name in files[first : first + 20]]
        write_archive(tmp_path / f"shard-{part:06}.tar", samples)
    keys = {"task": {**TASK, "labels": labels}, "data__validation_corpus": []}
    jobs = [
        load_job(write_job(tmp_path, name, **keys, data__corpus=[corpus]), ["data.validation_share=0.3"])
        for name, corpus in (("folders", str(folder / "train")), ("archives", f"{tmp_path}/shard-*.tar"))
    ]
    of_folder, of_archives = map(prepare, jobs)
    for split in ("train", "validation"):
        expected = samples_of(of_folder, split)
        assert [(file, spelled[name]) for file, name in expected] == samples_of(of_archives, split)
        assert expected
    archives = [*map(str, sorted(tmp_path.glob("*.tar")))]
    assert [*read_manifest(of_archives).header.files] == archives
    assert len(archives) == 3


@pytest.mark.long
@pytest.mark.parametrize("mode", ["fit_per_segment", pytest.param("schedule", marks=pytest.mark.schedule)])
def test_a_run_that_goes_on_at_another_world_size_is_the_one_that_was_not_stopped(
    folder: Path, run: Path, mode: str
) -> None:
    job = write_job(folder, f"resumed-{mode}")
    segments = "scaling.segments=[{from: 0%, workers: 1}, {from: 50%, workers: 2}]"
    main(["train", str(job), "train.length=3 epochs", f"scaling.mode={mode}", segments])
    resumed = folder / "runs" / f"resumed-{mode}"
    np.testing.assert_allclose(losses(resumed), losses(run), rtol=FLOAT64)
    assert audit(resumed).is_clean


@pytest.mark.long
def test_an_exported_model_is_timms_and_another_job_begins_with_it(folder: Path, run: Path, tmp_path: Path) -> None:
    main(["export", str(run), "--to", str(tmp_path / "timm")])
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert json.loads((tmp_path / "timm" / "config.json").read_text())["label_names"] == [*CLASSES]
    ours, _, _ = load_run(run)
    pixels = torch.randn(4, 3, PIXELS, PIXELS)
    with torch.no_grad():
        torch.testing.assert_close(theirs(pixels), ours.logits(pixels))
    begun = {**MODEL, "init_from": str(tmp_path / "timm")}
    job = write_job(folder, "finetuned", model=begun, drop={"method": "none"})
    main(["train", str(job), "train.length=1 steps", "train.peak_lr=1e-9"])
    tuned, _, _ = load_run(folder / "runs" / "finetuned")
    with torch.no_grad():
        torch.testing.assert_close(tuned.logits(pixels), ours.logits(pixels), atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_another_number_of_classes_wants_a_new_head(folder: Path, run: Path, complaint) -> None:
    other = {"model": {**MODEL, "classes": 2, "init_from": str(run)}, "task": {**TASK, "labels": ["red", "green"]}}
    job = write_job(folder, "other", **other)
    said = complaint("train", job)
    assert said.startswith("model.classes: ")
    assert said.endswith("has 3, this job 2; want 3, or model.new_head=true")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": {**TASK, "labels": ["red", "blue"]}}, "model.classes: task.labels has 2, the model 3; want the same"),
        ({"task": {**TASK, "label": "colour"}}, "no column 'colour' (of task), it has image, label"),
        ({"task": TASK}, "want a label of 0, 1, 2 ... 2, got '"),
        ({"data__reader": "ray_data"}, "data.reader: images are read from the shards' folder"),
        ({"data__only": ["a"]}, "data.only: images name no subset"),
        ({"data__tokenizer": "x.json"}, "data.tokenizer: images are read from the shards' folder"),
        (
            {"model": {**MODEL, "classes": 2}, "task": TASK, "data__corpus": "train"},
            "folders of 3 classes, the job says 2",
        ),
    ],
)
def test_mistakes_are_told_before_training(folder: Path, complaint, changes: dict[str, Any], said: str) -> None:
    if changes.get("data__corpus") == "train":
        changes = {**changes, "data__corpus": [str(folder / "train")]}
    assert said in complaint("train", write_job(folder, "wrong", **changes))


def test_images_that_can_not_be_read_are_rejected_by_their_place(folder: Path, tmp_path: Path) -> None:
    files = [file_of(image_of(number)) for number in range(30)]
    files[4] = files[4][:60]
    files[7] = b"not an image"
    files[9] = file_of(image_of(9).resize((60, 2)))
    pq.write_table(pa.table({"image": files, "label": ["red"] * 30}), tmp_path / "some.parquet")
    job = write_job(tmp_path, "broken", data__corpus=[str(tmp_path / "some.parquet")], data__validation_corpus=[])
    with pytest.raises(
        UserError, match=r"3 of 30 documents can't be read, .*some\.parquet:5: not an image that can be read"
    ):
        prepare(load_job(job))
    folder = prepare(load_job(job, ["data.max_rejected=0.2", "data.validation_share=0.2"]))
    assert read_manifest(folder).header.rejected == 3


def test_a_changed_image_is_found_when_it_is_read(folder: Path, tmp_path: Path) -> None:
    shards = prepare(
        load_job(
            write_job(
                tmp_path,
                "changed",
                data__corpus=[str(folder / "train.parquet")],
                data__validation_corpus=[str(folder / "test.parquet")],
            )
        )
    )
    (path,) = shards.glob("corpus-train-00000.arrow")
    content = bytearray(path.read_bytes())
    place = content.index(file_of(image_of(3))[30:60])
    content[place] ^= 1
    path.write_bytes(content)
    task = load_job(tmp_path / "changed.yaml")
    opened = task.task.build(task).open(shards)
    ids = np.arange(16)
    with pytest.raises(
        DamagedDataError, match=r"corpus-train-00000\.arrow: damaged \(the image of row 3 has changed\)"
    ):
        opened.batch(ids, Rows(shards, "train").read(ids), 0)
