"""Files with a checksum, so that one that was cut or changed is told from what was written. Needs no torch."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokendrop.errors import DamagedDataError

NO_FILE = (errno.ENOENT, errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
"""What the system says of a path where there is no file; all else it says of the storage."""

_KEY = "sha256"
_LAST_LINE = re.compile(r"# sha256 ([0-9a-f]{64})\n")
_WANT = "want the file as training wrote it (one without a checksum was cut, or is of an older tokendrop)"


def seal_text(text: str) -> str:
    """Lines, with a last one that holds their checksum; a comment, in YAML."""
    return f"{text}# {_KEY} {_sha256(text)}\n"


def read_sealed_text(path: Path) -> str:
    """What was sealed, without the last line.

    Raises:
        DamagedDataError: it can't be read, was changed, or has no checksum.
    """
    lines = _text(path).splitlines(keepends=True)
    last = _LAST_LINE.fullmatch(lines[-1]) if lines else None
    text = "".join(lines[:-1])
    if last is None or last[1] != _sha256(text):
        raise _damaged(path, last is not None)
    return text


def seal_json(tree: Mapping[str, Any]) -> str:
    """An object as JSON, with a last key that holds the checksum of the others."""
    return json.dumps({**tree, _KEY: _digest(tree)}, indent=1) + "\n"


def read_sealed_json(path: Path) -> dict[str, Any]:
    """The object that was sealed.

    Raises:
        DamagedDataError: it can't be read, was changed, or has no checksum.
    """
    try:
        tree = json.loads(_text(path))
    except (ValueError, RecursionError):
        raise _damaged(path, True) from None
    if not isinstance(tree, dict) or _KEY not in tree:
        raise _damaged(path, False)
    if tree.pop(_KEY) != _digest(tree):
        raise _damaged(path, True)
    return tree


def file_sha256(path: Path) -> str:
    """Of a file's bytes; Python's global interpreter lock is free while it is computed."""
    check_plain(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_plain(path: Path) -> None:
    """Raises OSError for a pipe or a device, which would be waited for; one that is missing is told when it is read."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a file", str(path))


def write_synced(path: Path, text: str) -> None:
    """Write a file that outlives a machine that stops."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _text(path: Path) -> str:
    try:
        check_plain(path)
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise _damaged(path, True) from None
    except OSError as error:
        if error.errno not in NO_FILE:  # of storage that may be there again soon
            raise
        raise DamagedDataError(f"{path}: can't be read ({error.strerror})") from None


def _damaged(path: Path, has_checksum: bool) -> DamagedDataError:
    reason = "its checksum is another one" if has_checksum else "it ends without a checksum"
    return DamagedDataError(f"{path}: damaged ({reason}); {_WANT}")


def _digest(tree: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(tree, sort_keys=True))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
