"""Classes of the user's own, named in a job: `my_method.py:MyMethod` or `package.module:MyMethod`."""

import dataclasses
import importlib
import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from tokendrop.errors import UserError, first_line

FILES = "tokendrop_file_"
"""Begins the names of modules that are files of the user: other processes can't import those by name."""


def is_named(name: object) -> bool:
    """Whether a value of a job names a class of the user's own."""
    return isinstance(name, str) and ":" in name


def named_class(name: str, key: str) -> Any:
    """The dataclass that a job names.

    Args:
        name: a file, from the working folder on, or a module that can be imported; a colon; a class.
        key: of the job, for messages.
    Raises:
        UserError: there is none.
    """
    where, _, class_name = name.rpartition(":")
    try:
        module = _of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError:
        raise UserError(f"{key}: no file {where} in {Path.cwd()}") from None
    except Exception as error:
        raise UserError(f"{key}: can't import {where} ({type(error).__name__}: {first_line(error)})") from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found) or "method" not in _fields(found):
        raise UserError(f"{key}: want a dataclass {class_name} with a field 'method' in {where}, found {found!r}")
    return found


def _fields(dataclass: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(dataclass)]


def _of_file(path: Path) -> ModuleType:
    """The module that a file is, loaded once in a process."""
    path = path.resolve()
    name = f"{FILES}{path.stem}_{sha256(bytes(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
