"""Keep documents apart under the stock `sdpa` and `eager` too, and refuse padding masks for ours.

Transformers finds packed documents by positions, but only where a model hands its positions to the
mask and no cache or mask is there; several models never do (GPT-OSS, OPT, Falcon, BLOOM, ...) and
attend across documents in silence. All masks are prepared in one private function. It is
wrapped here: inside `document_mask`, every mask gets the document numbers of the batch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("nopad.attention")

_documents: list[Tensor] = []
"""Innermost last. A list, not a context variable: torch.compile can read it."""
_POINT = "_preprocess_mask_arguments"
_EXPECTED = ["config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids"]


@contextmanager
def document_mask(cu_seqlens: Tensor, tokens: int) -> Iterator[None]:
    """Let the stock masks of a forward over one packed row of `tokens` respect its boundaries."""
    if not installed():
        raise RuntimeError(
            "this version of transformers prepares its masks elsewhere: documents cannot be kept "
            'apart under sdpa or eager; use attn_implementation="nopad"'
        )
    _documents.append(numbers(cu_seqlens, tokens))
    try:
        yield
    finally:
        _documents.pop()


def numbers(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """int [1, T]: which document each token of a packed row belongs to.

    >>> numbers(torch.tensor([0, 2, 5, 5]), 5).tolist()
    [[0, 0, 1, 1, 1]]
    """
    places = torch.arange(tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].long(), places, right=True)[None]


_installed = False


def installed() -> bool:
    """Whether the wrapper sits in place."""
    return _installed


def install(masking: ModuleType, name: str) -> bool:
    """Wrap the function in which Transformers prepares mask arguments, if it is as we know it."""
    global _installed
    original = getattr(masking, _POINT, None)
    if getattr(original, "wrapped_by", None) == name:
        return True
    if original is None or list(inspect.signature(original).parameters)[:5] != _EXPECTED:
        log.warning(
            "transformers no longer prepares masks in %s: padding masks given to %r cannot be "
            "refused, and stock attention cannot be taught the documents",
            _POINT,
            name,
        )
        return False
    setattr(masking, _POINT, _wrapped(original, name))
    _installed = True
    return True


_NO_MASK = (
    "attn_implementation='nopad' takes no attention_mask: it would be ignored. Pack the samples "
    "(nopad.collators) or generate through nopad.inference"
)


@torch.compiler.disable(reason=_NO_MASK)
def _hides_something(mask: Any) -> bool:
    """A few models make themselves a mask of ones: that one says nothing.

    A compiled model leaves its graph to look: a graph cannot refuse what only a value tells.
    """
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # cannot look; the step before the capture did
    return mask.ndim != 2 or not bool(mask.all())


def _wrapped(original: Any, name: str) -> Any:
    def prepare(config: Any, inputs_embeds: Tensor, attention_mask: Any, *rest: Any, **named: Any):
        ours = getattr(config, "_attn_implementation", None) == name
        if ours and attention_mask is not None and _hides_something(attention_mask):
            raise ValueError(_NO_MASK)
        made = original(config, inputs_embeds, attention_mask, *rest, **named)
        if made[0] or not _documents or inputs_embeds.shape[1] != _documents[-1].shape[1]:
            return made
        return (*made[:2], _documents[-1].expand(inputs_embeds.shape[0], -1), *made[3:])

    prepare.wrapped_by = name  # pyright: ignore[reportFunctionMemberAccess]
    return prepare
