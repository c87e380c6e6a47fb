"""The forward of padded rows as packs: inside a model, tokens of padding are never computed.

    input_ids [B, L], mask [B, L] ─▶ real tokens as packs [1, T] ─▶ backbone ─▶ hidden [1, T, H]
                                                                                     │
        TRL's LM head or score head, loss and metrics ◀─ hidden [B, L, H], 0 as padding

TRL computes log-probabilities and entropies from the hidden states of the labels, without logits of
all tokens. Only the backbone is replaced, so that every loss of TRL works as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...runtime import to_device, unwrap_model


@contextmanager
def packed_forward(model: Any, budget: int | None = None) -> Iterator[None]:
    """Compute padded rows as packs in the forwards of a model inside the block.

    Args:
        model: a causal LM or a sequence classifier of Transformers that isolates packed sequences.
        budget: tokens of a pack; default: all tokens of a batch are one pack.
    """
    backbone = unwrap_model(model).base_model
    replaced = vars(backbone).get("forward")
    if isinstance(replaced, partial) and replaced.func is unpacked_forward:
        yield  # an outer block has replaced it
        return
    backbone.forward = partial(unpacked_forward, backbone.forward, budget)
    try:
        yield
    finally:
        del backbone.forward
        if replaced is not None:
            backbone.forward = replaced


def unpacked_forward(
    forward: Any,
    budget: int | None,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Run a backbone on the packs of a padded batch; return its outputs in the padded layout.

    nopad's attention knows it by its name, and accepts packs in a classifier that calls it.
    """
    if attention_mask is None:
        return forward(input_ids=input_ids, **kwargs)
    inputs = [name for name, value in kwargs.items() if torch.is_tensor(value)]
    if input_ids is None or inputs:
        raise ValueError(
            f"{', '.join(inputs) or 'inputs without ids'} cannot be packed: train models of images "
            "and embeddings with TRL's own trainer"
        )
    mask = attention_mask.bool().cpu()
    index = to_device(mask.flatten().nonzero()[:, 0], input_ids.device)
    packs = split_rows([n for n in mask.sum(1).tolist() if n], budget)
    tokens = input_ids.flatten()[index].split([sum(lengths) for lengths in packs])
    outputs = [
        forward(input_ids=ids[None], **(kwargs | _boundaries(lengths, ids.device)))
        for ids, lengths in zip(tokens, packs, strict=True)
    ]
    fields = {
        name: _padded([output[name] for output in outputs], index, input_ids.shape)
        for name in outputs[0]
    }
    return type(outputs[0])(**fields)


def split_rows(lengths: list[int], budget: int | None) -> list[list[int]]:
    """Split sequences, in their order, into packs of at most `budget` tokens.

    >>> split_rows([3, 4, 2, 6], 7)
    [[3, 4], [2], [6]]
    """
    packs: list[list[int]] = [[]]
    for length in lengths:
        if budget is not None and length > budget:
            raise ValueError(f"a sequence of {length} tokens exceeds budget={budget}: raise it")
        if budget is not None and sum(packs[-1]) + length > budget:
            packs.append([])
        packs[-1].append(length)
    return packs


def _boundaries(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Return the arguments that tell a model where the sequences of a pack begin."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seq_lens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    cu_seq_lens, longest = to_device(cu_seq_lens, device), max(lengths)
    return {
        "position_ids": to_device(positions, device)[None],
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }


def _padded(values: list[Any], index: Tensor, shape: torch.Size) -> Any:
    """Copy the values of all packs to the places of their tokens; router logits stay [B * L, E]."""
    if isinstance(values[0], tuple):
        return tuple(_padded(list(layer), index, shape) for layer in zip(*values, strict=True))
    if not torch.is_tensor(values[0]):
        return values[0]
    is_batched = values[0].ndim == 3
    flat = torch.cat([value[0] if is_batched else value for value in values])
    padded = flat.new_zeros(shape.numel(), *flat.shape[1:]).index_copy(0, index, flat)
    return padded.unflatten(0, shape) if is_batched else padded
