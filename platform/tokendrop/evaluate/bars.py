"""Progress bars of the libraries that evaluation and export call."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


@contextmanager
def bars_on_terminals_alone() -> Iterator[None]:
    """Without a terminal no bar is drawn; lm-eval, datasets and transformers do not ask."""
    plain: Callable[..., None] = tqdm.__init__

    def silent(bar: tqdm, *args: Any, **kwargs: Any) -> None:
        plain(bar, *args, **{**kwargs, "disable": True})

    if not sys.stderr.isatty():
        tqdm.__init__ = silent  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        tqdm.__init__ = plain
