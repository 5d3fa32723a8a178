"""Real text that every Python has: its documentation topics and the sources of its standard library."""

import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa

from tokendrop.atomic import atomic_folder

_FILES = 4
_CHARACTERS = 8_000_000
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "pydoc_data", "__pycache__", "lib2to3", "encodings"}


def write_python_corpus(cache: Path) -> Path:
    """Write the corpus once, laid out as the Pile is: `.jsonl.zst` files of {"text", "meta"}.

    Args:
        cache: the folder below which it is kept.
    Returns:
        Its folder. It differs between versions of Python.
    """
    folder = cache / f"python-{platform.python_version()}"
    if folder.is_dir():
        return folder
    with atomic_folder(folder) as partial:
        documents = list(_documents())
        for number in range(_FILES):
            with pa.CompressedOutputStream(str(partial / f"{number:02}.jsonl.zst"), "zstd") as out:
                for text, name in documents[number::_FILES]:
                    out.write(json.dumps({"text": text, "meta": {"pile_set_name": name}}).encode() + b"\n")
    return folder


def _documents() -> Iterator[tuple[str, str]]:
    written = 0
    for _, text in sorted(topics.items()):
        written += len(text)
        yield text, "Python documentation"
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.intersection(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        written += len(text)
        if written > _CHARACTERS:
            return
        yield text, "Python standard library"
