"""YAML job files into dataclasses: one `base:`, `key=value` overrides, errors that name the key."""

import dataclasses
import inspect
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from tokendrop.config import plugin
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.files import Tree, kind_of, profile_mapping, read_mapping, shown
from tokendrop.config.hints import joined, key_hint, key_of, value_hint
from tokendrop.config.overrides import merge, with_override
from tokendrop.errors import UserError
from tokendrop.schedule.device import DeviceProfile
from tokendrop.schedule.duration import Duration
from tokendrop.secrets import HIDDEN, redact_all, restored, variables

_TOO_LARGE = 2**63  # for torch, numpy and Parquet alike


def load_job(path: str | Path, overrides: Sequence[str] = (), *, to_run: bool = True) -> ExperimentConfig:
    """Read a job file, apply `key=value` overrides with dotted keys, and check the whole.

    Args:
        to_run: whether secrets that are hidden in the file are needed; they are taken from the environment.
    Raises:
        UserError: the file, a key or a value is wrong; the message names it.
    """
    if "://" in str(path):
        raise UserError(f"{shown(path)}: want a job file on this machine")
    try:
        tree = read_job(Path(path))
        for override in overrides:
            tree = with_override(tree, override)
        tree = _whole(tree, "", path) if to_run else tree
    except RecursionError:
        raise UserError(f"{path}: a branch of this job holds itself") from None
    try:
        with plugin.copies_beside(Path(path)):
            return build(ExperimentConfig, tree, "")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def dump_job(config: ExperimentConfig) -> str:
    """The resolved job as YAML, without its secrets; `load_job` reads it back to an equal configuration."""
    return dump(config)


def dump(config: ExperimentConfig | DeviceProfile) -> str:
    """A job or a device profile as YAML, every key of it."""
    return yaml.safe_dump(redact_all(_plain(config)), sort_keys=False, allow_unicode=True, width=100)


def _whole(value: Any, key: str, path: str | Path) -> Any:
    """A branch of a job with what was hidden in it; UserError where the environment does not have that."""
    if isinstance(value, dict):
        return {name: _whole(below, joined(key, name), path) for name, below in value.items()}
    if isinstance(value, list):
        return [_whole(below, f"{key}[{number}]", path) for number, below in enumerate(value)]
    if not isinstance(value, str) or HIDDEN not in value:
        return value
    is_tracking = key == "track.uri"
    whole = restored(value, is_tracking=is_tracking)
    if whole is None:
        names = variables(value, is_tracking=is_tracking)
        raise UserError(
            f"{path}: {key}: {value}: its secret was not written down; give {key}=... on the command line"
            + (f", or set {names}" if names else "")
        )
    return whole


def read_job(path: Path) -> Tree:
    """The keys that a job file and its base give, as they are written there.

    Raises:
        UserError: one of them can't be read, or is no mapping.
    """
    return _read(path, depth=0)


def _read(path: Path, *, depth: int) -> Tree:
    tree = read_mapping(path, "job file", keys="'model:' and 'train:'")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise UserError(f"{path}: base: want the path of one job file, got {kind_of(base)}")
    if depth:
        raise UserError(f"{path}: base: a base job can't have a base of its own")
    return merge(_read(path.parent / base, depth=depth + 1), tree)


def build(target: Any, value: Any, path: str) -> Any:
    """`value` from YAML as the type `target`; any value fits `object`.

    Raises:
        UserError: it does not fit; the message begins with the dotted path of the key.
    """
    if target is object:
        return value
    origin, arguments = get_origin(target), get_args(target)
    if dataclasses.is_dataclass(target) and target is not Duration:
        return _dataclass(target, value, path)
    if origin in (Union, types.UnionType):
        return _union(arguments, value, path)
    if origin is Literal:
        if isinstance(value, bool) or value not in arguments:  # True equals 1
            raise UserError(f"{path}: want one of {', '.join(map(str, arguments))}{value_hint(value, arguments)}")
        return arguments[arguments.index(value)]
    if origin is tuple:
        if not isinstance(value, list):
            raise UserError(f"{path}: want a list, got {kind_of(value)}")
        return tuple(build(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        return _mapping(arguments[1], value, path)
    return _scalar(target, value, path)


def _mapping(target: Any, value: Any, path: str) -> dict[str, Any]:
    """Values of one type below keys of the user's; keys that are numbers become text."""
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: want a mapping of keys, got {kind_of(value)}")
    built: dict[str, Any] = {}
    for key, item in value.items():
        name = shown(str(key))
        if name in built:
            raise UserError(f"{joined(path, name)}: this key stands twice, as a number and as text")
        built[name] = build(target, item, joined(path, name))
    return built


def _dataclass(target: Any, value: Any, path: str) -> Any:
    if target is DeviceProfile and isinstance(value, str):
        value = profile_mapping(value, path)
    if not isinstance(value, Mapping):
        raise UserError(f"{path or 'job'}: want a mapping of keys, got {kind_of(value)}")
    value = _with_preset(target, dict(value), path)
    hints = get_type_hints(target)
    fields = {key_of(field): field for field in dataclasses.fields(target)}
    for key in value:
        if key not in fields:
            raise UserError(f"{joined(path, shown(key))}: unknown key{key_hint(key, target, path)}")
    for name in _needed(target):
        if name not in value:
            raise UserError(f"{joined(path, name)}: this key is needed and missing")
    arguments = {fields[key].name: _given(fields[key], hints, item, joined(path, key)) for key, item in value.items()}
    try:
        return target(**arguments)
    except UserError:
        raise
    except ValueError as error:
        key, colon, rest = str(error).partition(": ")
        raise UserError(
            f"{joined(path, key)}: {rest}" if colon and key in fields else f"{path}: {error}" if path else str(error)
        ) from None


def _given(field: dataclasses.Field[Any], hints: Mapping[str, Any], value: Any, path: str) -> Any:
    """A value of a field; its default where it equals that: 0.0 and 0 are one number, and name one trial."""
    built = build(hints[field.name], value, path)
    return field.default if built == field.default else built


def _needed(target: Any) -> list[str]:
    """Keys without a default."""
    absent = dataclasses.MISSING
    return [key_of(field) for field in dataclasses.fields(target) if field.default is field.default_factory is absent]


def _with_preset(target: Any, value: Tree, path: str) -> Tree:
    presets: dict[str, Tree] = getattr(target, "PRESETS", {})
    preset = value.get("preset")
    if not presets or preset is None:
        return value
    if not isinstance(preset, str) or preset not in presets:
        raise UserError(f"{path}.preset: want one of {', '.join(presets)}{value_hint(preset, presets)}")
    return presets[preset] | value


def _union(members: tuple[Any, ...], value: Any, path: str) -> Any:
    """None, or one of several dataclasses told apart by `kind` or `method`, or the first plain type that fits.

    Where that key is left out, it is the first dataclass, if this can do without any key. An abstract one among them
    stands for classes of the user's own.
    """
    if value is None and type(None) in members:
        return None
    base = next((member for member in members if inspect.isabstract(member)), None)
    members = tuple(member for member in members if member not in (type(None), base))
    variants = [member for member in members if dataclasses.is_dataclass(member) and member is not Duration]
    if variants and isinstance(value, Mapping):
        hints = {member: get_type_hints(member) for member in variants}
        if not {"kind", "method"} & set(hints[variants[0]]):
            return _dataclass(variants[0], value, path)
        tag = "kind" if "kind" in hints[variants[0]] else "method"
        kinds = {kind: member for member in variants for kind in get_args(hints[member][tag])}
        usual = len(kinds) == 1 or not _needed(variants[0])
        if not usual and tag not in value:
            raise UserError(f"{path}.{tag}: this key is needed: one of {', '.join(kinds)}")
        kind = value.get(tag, next(iter(kinds)))
        if base is not None and plugin.is_named(kind):
            return _dataclass(plugin.named_class(kind, f"{path}.{tag}", base), value, path)
        if not isinstance(kind, str) or kind not in kinds:
            raise UserError(f"{path}.{tag}: want one of {', '.join(kinds)}{value_hint(kind, kinds)}")
        return _dataclass(kinds[kind], value, path)
    errors: list[UserError] = []
    for member in members:
        try:
            return build(member, value, path)
        except UserError as error:
            errors.append(error)
    first, *others = members
    words = [str(word) for member in others if get_origin(member) is Literal for word in get_args(member)]
    if words and get_origin(first) is not Literal and not isinstance(value, list):
        raise UserError(str(errors[0]).replace(", got", f", or {', '.join(words)}, got", 1))
    raise errors[-1 if isinstance(value, list) else 0]


def _scalar(target: Any, value: Any, path: str) -> Any:
    if target is Duration:
        try:
            return Duration.parse(value)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None
    if target is bool and isinstance(value, bool):
        return value
    if target is str and isinstance(value, str):
        if "\0" in value or not _is_utf8(value):
            raise UserError(f"{path}: want text without NUL and without halves of characters, got {kind_of(value)}")
        return value
    number = _number(value)
    if target is float and number is not None:
        return float(number)
    if target is int and number is not None and number == int(number):
        return int(number)
    names = {bool: "true or false", str: "text", float: "a number", int: "a whole number"}
    if target not in names:  # of a class of the user's own
        raise UserError(f"{path}: a key can't be of type {target}; want bool, str, int, float, tuple or Mapping")
    limit = " below 2**63" if _is_number(value) and abs(value) >= _TOO_LARGE else ""
    raise UserError(f"{path}: want {names[target]}{limit}, got {kind_of(value)}")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(value: Any) -> int | float | None:
    """A finite number of 64 bits; PyYAML reads 3e-4 as text, and both spellings count here."""
    if isinstance(value, str):
        try:
            value = int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
        except ValueError:
            return None
    return value if _is_number(value) and abs(value) < _TOO_LARGE else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    if isinstance(value, Duration):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {key_of(field): _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
