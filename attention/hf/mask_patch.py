"""Patch Transformers' masks: refuse padding masks for `nopad`, isolate documents in stock ones.

Transformers prepares all masks in one private function, `_preprocess_mask_arguments`. A wrapper
around it has two uses:

    nopad         refuse a padding mask, and skip the preparation, which costs a host sync; the
                  "mask" of a model whose images see themselves says which tokens see the next one
    sdpa, eager   inside `document_mask`, add the document ids of the batch to the mask; by itself
                  Transformers finds packed documents by their positions, which several models do
                  not pass to the mask (GPT-OSS, OPT, Falcon, BLOOM, ...): these attend across
                  documents without any error

Importing installs nothing. `refuse_mask` is registered as the mask function of `nopad`:
Transformers calls it in the first forward, after its own preparation. It refuses a padding mask and
installs the wrapper for the forwards that follow. If the private function has moved, `refuse_mask`
is called in every forward instead.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from .call_log import is_recording
from .model_types import refuse_unsupported

log = logging.getLogger("nopad.attention")

ATTN_IMPLEMENTATION = "nopad"
_TARGET = "_preprocess_mask_arguments"
_PARAMETERS = ["config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids"]
_MASK_REFUSED = (
    "attn_implementation='nopad' takes no attention_mask: it would be ignored. Pack the samples "
    "(nopad.collators) or generate through nopad.inference"
)

_documents: list[Tensor] = []
"""Document ids, innermost last. A list, not a ContextVar: torch.compile can read it."""


@contextmanager
def document_mask(cu_seqlens: Tensor, tokens: int) -> Iterator[None]:
    """Make stock masks inside respect the documents of one packed row of `tokens` tokens."""
    if not install_mask_patch():
        raise RuntimeError(
            "this version of transformers prepares its masks elsewhere: documents cannot be "
            'isolated under sdpa or eager; use attn_implementation="nopad"'
        )
    _documents.append(document_ids(cu_seqlens, tokens))
    try:
        yield
    finally:
        _documents.pop()


def document_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """int [1, T]: the index of the document each token of a packed row belongs to.

    >>> document_ids(torch.tensor([0, 2, 5, 5]), 5).tolist()
    [[0, 0, 1, 1, 1]]
    """
    index = torch.arange(tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].long(), index, right=True)[None]


def refuse_mask(
    *, attention_mask: Tensor | None = None, config: Any = None, **unused: Any
) -> Tensor | None:
    """Refuse a padding mask: the mask function of `nopad` in Transformers.

    A model that cannot be served is refused here as well, since it may call nothing else of ours.
    """
    _check_no_mask(attention_mask)
    if not torch.compiler.is_compiling():  # compiled graphs drop the unused preparation anyway
        _check_served(config)
        install_mask_patch()
        return _joined_image_tokens(sys._getframe(1).f_locals)
    return None


def mask_patch_installed() -> bool:
    """Return whether the wrapper is in place."""
    return hasattr(getattr(masking_utils, _TARGET, None), "nopad_original")


def install_mask_patch() -> bool:
    """Wrap the private function, once; return whether the wrapper is in place."""
    if mask_patch_installed():
        return True
    original = getattr(masking_utils, _TARGET, None)
    if original is None or list(inspect.signature(original).parameters)[:5] != _PARAMETERS:
        _log_moved()
        return False
    setattr(masking_utils, _TARGET, _wrap(original))
    return True


def uninstall_mask_patch() -> None:
    """Put the private function of Transformers back."""
    if mask_patch_installed():
        setattr(masking_utils, _TARGET, getattr(masking_utils, _TARGET).nopad_original)


@cache
def _log_moved() -> None:
    log.warning(
        "transformers no longer prepares masks in %s: forwards with %r prepare a mask they do not "
        "use, and documents cannot be isolated under stock attention",
        _TARGET,
        ATTN_IMPLEMENTATION,
    )


def _check_served(config: Any) -> None:
    if not is_recording():
        refuse_unsupported(config)


def _check_no_mask(mask: Any) -> None:
    if mask is not None and _masks_anything(mask):
        raise ValueError(_MASK_REFUSED)


@torch.compiler.disable(reason=_MASK_REFUSED)
def _masks_anything(mask: Any) -> bool:
    """Return whether a mask hides a token: a few models build a mask of ones, which is accepted.

    A compiled model breaks its graph here: a graph cannot raise for what only a value shows.
    """
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # values cannot be read here; the step before the capture read them
    return mask.ndim != 2 or not bool(mask.all())


def _wrap(original: Any) -> Any:
    def preprocess(
        config: Any, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple:
        if config._attn_implementation == ATTN_IMPLEMENTATION:
            _check_no_mask(attention_mask)
            joined = None
            if not torch.compiler.is_compiling():
                _check_served(config)
                joined = _joined_image_tokens(sys._getframe(1).f_locals)
            # Transformers returns early for a 4-D mask, in a tuple whose length its versions vary.
            early = original(config, inputs_embeds, _four_dims(inputs_embeds), *args, **kwargs)
            return (True, joined, *early[2:])
        prepared = original(config, inputs_embeds, attention_mask, *args, **kwargs)
        early_exit = prepared[0]
        if early_exit or not _documents or inputs_embeds.shape[1] != _documents[-1].shape[1]:
            return prepared
        return (*prepared[:2], _documents[-1].expand(inputs_embeds.shape[0], -1), *prepared[3:])

    preprocess.nopad_original = original  # pyright: ignore[reportFunctionMemberAccess]
    return preprocess


def _joined_image_tokens(arguments: dict[str, Any]) -> Tensor | None:
    """bool [B, T, 1]: whether a token sees the next one, for models whose images do.

    arguments: those of the function of Transformers that builds a mask: the images are among them,
        or in a function which tells what queries see besides earlier keys.
    """
    sees, images = (arguments.get(name) for name in ("or_mask_function", "block_sequence_ids"))
    if images is not None:
        sees = masking_utils.blockwise_overlay(images)
    if sees is None:
        return None
    if not sees.__qualname__.startswith("blockwise_overlay."):
        raise ValueError(
            f"attn_implementation='nopad' cannot serve a model that adds {sees.__qualname__} to "
            "its mask: build it with another one"
        )
    rows, columns, _ = arguments["inputs_embeds"].shape
    device = arguments["inputs_embeds"].device
    row, token = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    return (sees(row, 0, token, (token + 1) % columns) & (token + 1 < columns))[..., None]


def joins_image_tokens(mask: Tensor) -> bool:
    """Return whether a mask says which tokens see the next one; no other mask has its shape."""
    return mask.dtype == torch.bool and mask.ndim == 3 and mask.shape[2] == 1


def _four_dims(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.ndim)]
