"""The images of a corpus are the same however they are kept, and what is none is told by its place."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from images import CLASSES, file_of, image_of, write_archive
from tokendrop.data.corpus import image_records
from tokendrop.data.corpus.image_records import ImageRecord, classes_of, list_images, read_images
from tokendrop.errors import UserError

COUNT = 9
FILES = [file_of(image_of(number)) for number in range(COUNT)]
COLUMNS = ("image", "label")


def as_folder(place: Path, labels: list[str]) -> Path:
    for number, (file, label) in enumerate(zip(FILES, labels, strict=True)):
        (place / label).mkdir(parents=True, exist_ok=True)
        (place / label / f"{number:03}.png").write_bytes(file)
    (place / "README.md").write_text("not an image")
    (place / ".hidden").mkdir()
    (place / ".hidden" / "0.png").write_bytes(FILES[0])
    return place


def as_table(place: Path, labels: list[str]) -> Path:
    pq.write_table(pa.table({"image": FILES, "label": labels, "name": labels}), place.with_suffix(".parquet"))
    return place.with_suffix(".parquet")


def as_hugging_face(place: Path, labels: list[str]) -> Path:
    images = [{"bytes": file, "path": None} for file in FILES]
    table = pa.table({"image": images, "label": labels})
    with pa.OSFile(str(place.with_suffix(".arrow")), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return place.with_suffix(".arrow")


def as_archive(place: Path, labels: list[str]) -> Path:
    return write_archive(place.with_suffix(".tar"), zip(FILES, labels, strict=True))


def records(place: Path, after: int = 0) -> list[ImageRecord]:
    files = list_images([str(place)], cache=place.parent, key="data.corpus")
    return [record for file in files for record in read_images(file, COLUMNS, after)]


@pytest.mark.parametrize("write", [as_folder, as_table, as_hugging_face, as_archive])
def test_all_forms_of_a_corpus_have_its_images_with_their_labels(tmp_path: Path, write: Callable[..., Path]) -> None:
    labels = [CLASSES[number % 3] for number in range(COUNT)]
    found = records(write(tmp_path / "corpus", labels))
    assert all(not one.reason for one in found)
    assert sorted((one.content, one.label) for one in found) == sorted(zip(FILES, labels, strict=True))


@pytest.mark.parametrize("write", [as_table, as_hugging_face, as_archive])
@pytest.mark.parametrize("after", [0, 1, 5, COUNT])
def test_reading_goes_on_after_any_record(tmp_path: Path, write: Callable[..., Path], after: int) -> None:
    place = write(tmp_path / "corpus", ["0"] * COUNT)
    assert records(place, after) == records(place)[after:]
    assert [one.number for one in records(place)] == list(range(1, COUNT + 1))


@pytest.mark.parametrize("of_part", [2, 100])
def test_a_folder_is_read_in_parts_that_mix_its_classes_and_go_on_too(
    tmp_path: Path, monkeypatch, of_part: int
) -> None:
    monkeypatch.setattr(image_records, "_IMAGES_OF_PART", of_part)
    place = as_folder(tmp_path / "corpus", [CLASSES[number % 3] for number in range(COUNT)])
    (place / "blue" / "loop").symlink_to(place)
    files = list_images([str(place)], cache=tmp_path, key="data.corpus")
    assert (len(files) == 1) == (of_part == 100)
    assert classes_of(files) == set(CLASSES)
    found = [[*read_images(file, COLUMNS, 0)] for file in files]
    assert sorted(one.content for part in found for one in part) == sorted(FILES)
    assert [[*read_images(file, COLUMNS, 1)] for file in files] == [part[1:] for part in found]
    labels = [one.label for part in found for one in part]
    assert labels not in (sorted(labels), sorted(labels, reverse=True))
    (place / "blue" / "more.png").write_bytes(FILES[0])
    with pytest.raises(UserError, match=r"part .*: changed while it was read"):
        [list(read_images(file, COLUMNS, 0)) for file in files]


def test_images_that_moved_to_another_class_are_other_files(tmp_path: Path) -> None:
    """As `mv` leaves their names, sizes and times as they were."""
    place = as_folder(tmp_path / "corpus", [CLASSES[number % 3] for number in range(COUNT)])
    (before,) = list_images([str(place)], cache=tmp_path, key="data.corpus")
    (place / "red" / "000.png").rename(place / "blue" / "000.png")
    (after,) = list_images([str(place)], cache=tmp_path, key="data.corpus")
    assert (after.name, after.size) == (before.name, before.size)
    assert after.modified != before.modified
    with pytest.raises(UserError, match=r"part .*: changed while it was read"):
        list(read_images(before, COLUMNS, 2))


def test_an_image_that_can_not_be_looked_at_is_no_missing_one(tmp_path: Path) -> None:
    place = as_folder(tmp_path / "corpus", ["0"] * COUNT)
    (place / "0" / "gone.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(UserError, match=r"^data\.corpus: can't open .*/gone\.png is no file that can be read\)$"):
        records(place)


def test_images_beside_tables_are_refused(tmp_path: Path) -> None:
    place = as_folder(tmp_path / "corpus", ["0"] * COUNT)
    as_table(place / "more", ["0"] * COUNT)
    with pytest.raises(UserError, match="has both images and tables"):
        records(place)


@pytest.mark.parametrize("member", range(1, 6))
def test_an_archive_with_a_damaged_header_is_not_taken_for_a_shorter_one(tmp_path: Path, member: int) -> None:
    place = as_archive(tmp_path / "corpus", ["0"] * COUNT)
    with tarfile.open(place) as archive:
        offset = archive.getmembers()[member].offset
    content = bytearray(place.read_bytes())
    content[offset + 150] ^= 1  # of its checksum
    place.write_bytes(content)
    assert records(place)[-1].reason.startswith("damaged or cut short from here on")


def test_what_is_no_image_or_has_no_label_is_told(tmp_path: Path) -> None:
    table = pa.table({"image": [b"", None, FILES[0]], "label": pa.array([1, 2, None])})
    pq.write_table(table, tmp_path / "corpus.parquet")
    reasons = [one.reason for one in records(tmp_path / "corpus.parquet")]
    assert reasons == ["want the bytes of an image in 'image'"] * 2 + ["want a label in 'label', got None"]


def test_an_archive_that_is_cut_short_gives_what_was_before(tmp_path: Path) -> None:
    place = as_archive(tmp_path / "corpus", ["0"] * COUNT)
    whole = records(place)
    content = place.read_bytes()
    place.write_bytes(content[: len(content) // 2])
    found = records(place)
    assert found[:-1] == whole[: len(found) - 1]
    assert found[-1].reason.startswith("damaged or cut short from here on")


def test_a_sample_of_an_archive_without_its_image_or_label_is_told(tmp_path: Path) -> None:
    place = tmp_path / "corpus.tar"
    with tarfile.open(place, "w") as archive:
        for name, content in (("a.png", FILES[0]), ("b.cls", b"1"), ("c.jpg", FILES[1]), ("c.cls", b"2")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    first, second, third = records(place)
    assert first.reason == "want a label (.label or .cls) beside png"
    assert second.reason == "want an image beside cls"
    assert third == ImageRecord(3, FILES[1], "2")


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    with pytest.raises(
        UserError, match=r"data\.corpus: no such file, folder or glob: .*\(want \.parquet, \.arrow, \.tar\)"
    ):
        records(tmp_path / "corpus")
