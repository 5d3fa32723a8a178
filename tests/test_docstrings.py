"""What is public says what it is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "platform" / "tokendrop"
FILES = sorted(PACKAGE.rglob("*.py"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def public(body: list[ast.stmt]) -> Iterator[Definition]:
    """Definitions of a body that others use, without what implements Python's own protocols."""
    yield from (node for node in body if isinstance(node, Definition) and not node.name.startswith("_"))


def classes() -> Iterator[ast.ClassDef]:
    yield from (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


OURS = {one.name: one for one in classes()}


def bases(one: ast.ClassDef) -> list[str]:
    """The names of its bases."""
    names = [base.value if isinstance(base, ast.Subscript) else base for base in one.bases]
    return [base.attr if isinstance(base, ast.Attribute) else ast.unparse(base) for base in names]


def told_by(one: ast.ClassDef) -> set[str]:
    """Methods that a class explains, or a base of it."""
    told = {method.name for method in public(one.body) if ast.get_docstring(method)}
    return told.union(*(told_by(OURS[base]) for base in bases(one) if base in OURS))


def is_protocol(one: ast.ClassDef) -> bool:
    return bool({"Protocol", "ABC"} & {*bases(one)})


PROTOCOLS = [(told_by(one), {method.name for method in public(one.body)}) for one in OURS.values() if is_protocol(one)]


def told_for(one: ast.ClassDef) -> set[str]:
    """Methods that need no words of their own: a base explains them, or a protocol that the class has all of."""
    has = {method.name for method in public(one.body)}
    of_protocols = [told for told, methods in PROTOCOLS if methods <= has]
    return told_by(one).union(*of_protocols, *(told_for(OURS[base]) for base in bases(one) if base in OURS))


def has_foreign_base(one: ast.ClassDef) -> bool:
    """Whether its methods may be those of a library, which explains them."""
    return any(
        base not in OURS or has_foreign_base(OURS[base]) for base in bases(one) if base not in ("Protocol", "ABC")
    )


def untold(path: Path) -> Iterator[str]:
    for node in public(TREES[path].body):
        if not ast.get_docstring(node):
            yield node.name
        if isinstance(node, ast.ClassDef) and not has_foreign_base(node):
            yield from (
                f"{node.name}.{method.name}"
                for method in public(node.body)
                if not ast.get_docstring(method) and method.name not in told_for(node)
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_public_has_a_docstring(path: Path) -> None:
    assert list(untold(path)) == []


def raised(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names of the exceptions that a function raises itself, without those that it may catch itself."""
    found: set[str] = set()
    below: list[ast.AST] = [*function.body]
    while below:
        node = below.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.With):
            continue
        if isinstance(node, ast.Try):
            below.extend([*node.handlers, *node.orelse, *node.finalbody])
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            found.add(ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc).rpartition(".")[2])
        below.extend(ast.iter_child_nodes(node))
    return {name for name in found if name[0].isupper() and name.endswith(("Error", "Interrupt"))}


def unsaid(path: Path) -> Iterator[str]:
    """Public functions whose docstring leaves out an exception that they raise."""
    for node in ast.walk(TREES[path]):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        text = ast.get_docstring(node)
        if text is not None and "raises as" not in text and not all(name in text for name in raised(node)):
            yield node.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_docstring_names_what_is_raised(path: Path) -> None:
    assert list(unsaid(path)) == []
