"""The step's metadata on its way to the layers, for models that lose keywords.

Most models hand unknown keywords of their forward down to the attention function. A few drop them;
there, what the caller carries arrives this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..varlen import Varlen

_carried: list[Varlen] = []
"""Innermost last. A list, not a context variable: torch.compile can read it, and so can the threads
in which a backward pass recomputes checkpointed layers."""


@contextmanager
def forward_context(varlen: Varlen) -> Iterator[None]:
    """Make a step's metadata reach every attention layer called inside.

    >>> from torch import tensor
    >>> with carry(Varlen(tensor([0, 3]), 3)):
    ...     carried().max_length
    3
    """
    _carried.append(varlen)
    try:
        yield
    finally:
        _carried.pop()


def current_varlen() -> Varlen | None:
    """What the nearest `forward_context` around this call holds."""
    return _carried[-1] if _carried else None
