"""timm where torchvision is not installed, or is of another build than torch: its models do without."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


class _Anything(type):
    """A class that has whatever is asked of it, each another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {"__init__": lambda *_, **__: None})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(_Anything("torchvision", (), {}), name)


class _StandIn(MetaPathFinder, Loader):
    """For torchvision and all below it."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_timm() -> Any:
    """timm; the test is skipped where it is not installed. Others still find no torchvision, or theirs."""
    if "timm" not in sys.modules:
        pytest.importorskip("PIL")
        stand_in = _StandIn()
        sys.meta_path.insert(0, stand_in)
        try:
            import_module("timm")
        except ModuleNotFoundError:
            pytest.skip("timm is not installed")
        finally:
            sys.meta_path.remove(stand_in)
            for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
                del sys.modules[name]
    return sys.modules["timm"]
