"""Call a model's own forwards where torch.compile has put compiled code in their place.

Compiled code is specialized to the shapes of training, and would compile again for every step. The
engine has its own fused kernels and CUDA graphs, and must see each attention layer being called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def eager_calls(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Bypass `module.compile()`, `torch.compile(module)` and compiled forwards inside."""
    # At every step, over all modules: plain dict lookups.
    calls = [
        (attributes, call)
        for module in modules
        if (call := (attributes := module.__dict__).get("_compiled_call_impl")) is not None
    ]
    forwards = [
        (attributes, forward)
        for module in modules
        if (forward := (attributes := module.__dict__).get("forward")) is not None
        and hasattr(forward, "_torchdynamo_orig_callable")
    ]
    try:
        for attributes, _ in calls:
            attributes["_compiled_call_impl"] = None
        for attributes, forward in forwards:
            attributes["forward"] = forward._torchdynamo_orig_callable
        yield
    finally:
        for attributes, call in calls:
            attributes["_compiled_call_impl"] = call
        for attributes, forward in forwards:
            attributes["forward"] = forward
