"""What happens to files: a bit that turns, an end that is missing, a file that is gone, doubled or another one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from tokendrop.train.checkpoint_index import META, write_meta
from tokendrop.train.sealed import file_sha256


def flip_bit(path: Path, where: float) -> None:
    """Turn one bit, so far into the file (0 to 1)."""
    content = bytearray(path.read_bytes())
    if content:
        bit = min(int(where * 8 * len(content)), 8 * len(content) - 1)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)


def truncate(path: Path, where: float) -> None:
    """Cut the file, so far into it."""
    content = path.read_bytes()
    path.write_bytes(content[: int(where * len(content))])


def delete(path: Path, where: float = 0) -> None:
    path.unlink()


def duplicate(path: Path, where: float = 0) -> None:
    """The content once more behind itself, as a write that was repeated leaves it."""
    path.write_bytes(path.read_bytes() * 2)


def swap_with_garbage(path: Path, where: float) -> None:
    """As many other bytes."""
    size = path.stat().st_size
    path.write_bytes(
        bytes((int(where * 997) + 31 * number) % 256 for number in range(min(size, 4096))).ljust(size, b"?")
    )


KINDS: dict[str, Callable[[Path, float], None]] = {
    function.__name__: function for function in (flip_bit, truncate, delete, duplicate, swap_with_garbage)
}


@dataclass(frozen=True)
class Mutation:
    """One of `KINDS`, and where it strikes: which of the files, and how far into it."""

    kind: str
    file: float
    where: float

    def strike(self, folder: Path) -> Path:
        """Change one file below `folder`; which one it was."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        path = files[min(int(self.file * len(files)), len(files) - 1)]
        KINDS[self.kind](path, self.where)
        return path


def mutations() -> st.SearchStrategy[Mutation]:
    share = st.floats(0, 1, exclude_max=True)
    return st.builds(Mutation, kind=st.sampled_from(sorted(KINDS)), file=share, where=share)


def seal_again(checkpoint: Path, step: int) -> None:
    """Checksums as whoever made the checkpoint up would write them."""
    names = {path.name for path in checkpoint.glob("[!.]*")} - {META}
    write_meta(checkpoint, {"name": "tiny", "step": step}, {name: file_sha256(checkpoint / name) for name in names})
