"""Folders with rules about what of them is uploaded."""

from pathlib import Path

from hypothesis import strategies as st

_FILES, _FOLDERS = ("c.txt", "d.bin", "e f", "!n"), ("a", "b", "venv", "f.bin", "#h")
_PARTS = (*_FILES, *_FOLDERS, "*", "**", "*.txt", "*.bin", "?", "[ab]", "[!a]", r"\#h", r"\!n", r"e\ f")


@st.composite
def pattern(draw: st.DrawFn) -> str:
    """A line of a .gitignore that git and Ray read alike.

    They don't where `**` stands alone or twice, and where `!` brings back a whole folder by its name.
    """
    parts = draw(st.lists(st.sampled_from(_PARTS), min_size=1, max_size=3))
    if draw(st.booleans()):
        return "!" + "/".join([*(part for part in parts[1:] if part != "**"), draw(st.sampled_from(_FILES))])
    whole = "/".join(parts) + draw(st.sampled_from(["", "", "/", "/*", "/**"]))
    if whole.count("**") > (len(parts) > 1):
        return parts[0].replace("**", "a")
    return draw(st.sampled_from(["", "", "/"])) + whole


files = st.integers(0, 99)
rules = st.dictionaries(st.sampled_from([".gitignore", ".rayignore"]), st.lists(pattern(), min_size=1, max_size=3))


def folders(inside: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    named = [st.dictionaries(st.sampled_from(_FILES), files), st.dictionaries(st.sampled_from(_FOLDERS), inside)]
    return st.tuples(st.tuples(*named).map(lambda parts: parts[0] | parts[1]), rules)


trees = folders(st.recursive(folders(st.nothing()), folders, max_leaves=4))
"""A folder: what is in it by name, and the rules that it has; a file is the number of its bytes."""


def write_tree(path: Path, tree: object) -> None:
    """Put a tree at a path."""
    if isinstance(tree, int):
        path.write_bytes(b"x" * tree)
        return
    assert isinstance(tree, tuple)
    inside, rules = tree
    path.mkdir()
    for name, patterns in rules.items():
        (path / name).write_text("\n".join(patterns))
    for name, part in inside.items():
        write_tree(path / name, part)
