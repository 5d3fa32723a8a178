"""Classes of the user's own, named in a job: `my_method.py:MyMethod` or `package.module:MyMethod`."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from tokendrop.errors import UserError, first_line

T = TypeVar("T")
FILES = "tokendrop_file_"
"""Begins the names of modules that are files of the user: other processes can't import those by name."""
COPIES = "own"
"""The folder beside a run's job.yaml with copies of those files."""

RUNS_COPIES = "TOKENDROP_RUN_COPIES"
"""Environment variable: 1 where those copies may be run, which are whatever the run's folder holds."""

_contents: dict[str, str] = {}
"""Of modules that are files of the user: the SHA-256 of what was loaded."""
_copies: ContextVar[Path | None] = ContextVar("copies", default=None)


@contextmanager
def copies_beside(job: Path) -> Iterator[None]:
    """While the block runs, files that are not below the working folder are looked for beside a job."""
    token = _copies.set(job.parent / COPIES)
    try:
        yield
    finally:
        _copies.reset(token)


def copy_of(name: str, folder: Path) -> Path | None:
    """Where the copy of the file in a class's name lies in a run's folder; None where there is no file in it."""
    file = file_of(name)
    return None if file is None else folder / COPIES / str(file).replace("/", "__")


def found_file(name: str) -> Path | None:
    """The file in a class's name, or its copy where that is gone; None where there is no file in it.

    Raises:
        FileNotFoundError: there is neither, or a copy that may not be run; the message says so.
    """
    file, copies = file_of(name), _copies.get()
    if file is None or file.is_file():
        return file
    copy = None if copies is None else copy_of(name, copies.parent)
    missing = f"no file {file} in {Path.cwd()}"
    if copy is None or not copy.is_file():
        raise FileNotFoundError(missing)
    if os.environ.get(RUNS_COPIES) != "1":
        raise FileNotFoundError(f"{missing}; {RUNS_COPIES}=1 runs the copy in {copy}, which you should trust")
    return copy


def is_named(name: object) -> bool:
    """Whether a value of a job names a class of the user's own."""
    return isinstance(name, str) and ":" in name


def named_class(name: str, key: str, base: type) -> Any:
    """The dataclass that a job names.

    Args:
        name: a file, from the working folder on, or a module that can be imported; a colon; a class.
        key: of the job, for messages.
        base: what it must be below of, with nothing of that left open.
    Raises:
        UserError: there is none.
    """
    where, _, class_name = name.rpartition(":")
    try:
        file = found_file(name)
        module = importlib.import_module(where) if file is None else _of_file(file)
    except FileNotFoundError as error:
        raise UserError(f"{key}: {error}") from None
    except Exception as error:
        raise UserError(f"{key}: can't import {where} ({type(error).__name__}: {first_line(error)})") from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not issubclass(found, base) or inspect.isabstract(found):
        raise UserError(f"{key}: want a whole class below {base.__name__} as {class_name} in {where}, found {found!r}")
    return found


def loaded_here(branch: T, key: str, name: str, content: str | None) -> T:
    """A branch of a job with the class of this process, where it has come with a class of another one's file.

    Args:
        key: of the job, for messages.
        name: what the job has there.
        content: what `content_of` gave for it in the other process.
    Raises:
        UserError: there is no such file here, or it has another content by now.
    """
    file = file_of(name)
    if file is None:
        return branch
    found = named_class(name, key, object)
    if {content_of(name), hashlib.sha256(file.read_bytes()).hexdigest()} != {content}:
        sys.modules.pop(_module_name(file), None)  # for whoever comes after it was put right
        raise UserError(f"{key}: {file} has changed since it was read; want it as it was, or all of this begun anew")
    values: Any = {field.name: getattr(branch, field.name) for field in fields(cast(Any, branch)) if field.init}
    return found(**values)


def content_of(name: str) -> str | None:
    """The SHA-256 of the file in a class's name, as this process has loaded it; None where there is no file in it."""
    file = file_of(name)
    if file is None or not file.is_file():
        return None
    module = _module_name(file)
    return _contents[module] if module in sys.modules else hashlib.sha256(file.read_bytes()).hexdigest()


def file_of(name: str) -> Path | None:
    """The file in a class's name, as it is written there; None for one of a module, or of our own."""
    where = name.rpartition(":")[0]
    return Path(where) if where.endswith(".py") else None


def import_class(name: str) -> Any:
    """A class of our own, `package.module:Class`; imported when it is needed, for it needs more than its callers."""
    module, _, class_name = name.partition(":")
    return getattr(importlib.import_module(module), class_name)


def _of_file(path: Path) -> ModuleType:
    """The module that a file is, loaded once in a process."""
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    _contents[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_name(path: Path) -> str:
    path = path.resolve()
    return f"{FILES}{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
