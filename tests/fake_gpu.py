"""A GPU that computes nothing, for tests of when the host would wait for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)


class HostWaitsError(AssertionError):
    """The host waits for the GPU."""


class _NoWaiting(TorchDispatchMode):
    """Refuses copies between host and GPU for which the host waits; reading a value is refused by fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._pin_memory.default:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        out = func(*args, **kwargs)
        devices = {value.device.type for value in (*args, out) if isinstance(value, Tensor) and value.ndim}
        moves = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if moves and devices == {"cpu", "cuda"}:
            self.copies += 1
            is_async = kwargs.get("non_blocking") or (func is torch.ops.aten.copy_.default and args[2:] == (True,))
            to_gpu = args[0].device.type == "cpu"
            if not is_async or (to_gpu and not any(args[0] is one for one in self.pinned)):
                raise HostWaitsError(f"{func} {args}")
        return out


class _NoDriver(TorchFunctionMode):
    """Does by operators what torch's own C++ would ask the driver of the current GPU for, which is not there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_gpu = args and isinstance(args[0], Tensor) and args[0].is_cuda
        if func is Tensor.__getitem__ and on_gpu:
            return _view(*args)
        if func is Tensor.__setitem__ and on_gpu:
            return _view(*args[:2]).copy_(args[2])
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], torch.device) and args[1] != args[0].device:
            return torch.ops.aten._to_copy.default(args[0], device=args[1], **kwargs)
        return func(*args, **kwargs)


def _view(value: Tensor, index: Any) -> Tensor:
    """Basic indexing."""
    dim = 0
    for one in index if isinstance(index, tuple) else (index,):
        if one is None:
            value = value.unsqueeze(dim)
        elif isinstance(one, slice):
            value = torch.ops.aten.slice.Tensor(value, dim, one.start, one.stop)
        else:
            value, dim = value.select(dim, one), dim - 1
        dim += 1
    return value


class Stream:
    """Of a GPU that computes nothing; tells the order of things."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def record_event(self) -> "Event":
        self.told.append(f"{self.name} records")
        return Event(self.told)

    def wait_event(self, event: "Event") -> None:
        self.told.append(f"{self.name} waits")


class Event:
    def __init__(self, told: list[str]) -> None:
        self.told = told

    def synchronize(self) -> None:
        self.told.append("host waits")
        raise HostWaitsError("synchronize")


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[_NoWaiting, list[str]]]:
    """In here tensors on `GPU` have shapes and no values, and whatever the host would wait for is an error.

    Gives what counts copies, and what the streams were told.
    """
    told: list[str] = []
    computing = Stream("computing", told)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: computing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream("copying", told))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        told.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(f"thread on {device}"))
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: told.append(f"kept for {stream.name}"))
    with FakeTensorMode(allow_non_fake_inputs=True), _NoWaiting() as seen, _NoDriver():
        yield seen, told
