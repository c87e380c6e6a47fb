"""The step's metadata on its way to the layers: a context variable, for models that lose keywords.

Most models hand unknown keywords of their forward down to the attention function. A few drop them;
there, what the caller carries arrives this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .varlen import Varlen

_carried: ContextVar[Varlen | None] = ContextVar("nopad_varlen", default=None)


@contextmanager
def carry(varlen: Varlen) -> Iterator[None]:
    """Make a step's metadata reach every attention layer called inside.

    >>> from torch import tensor
    >>> with carry(Varlen(tensor([0, 3]), 3)):
    ...     carried().max_length
    3
    """
    token = _carried.set(varlen)
    try:
        yield
    finally:
        _carried.reset(token)


def carried() -> Varlen | None:
    """What the nearest `carry` around this call holds."""
    return _carried.get()
