"""`packed_forward`: run padded batches through a model as packs; padding is never computed.

    input_ids [B, L], mask [B, L] ─▶ real tokens as packs [1, T] ─▶ backbone ─▶ hidden [1, T, H]
                                                                                     │
      the LM head, score head or pooling of the model ◀─ hidden [B, L, H], 0 as padding

Only the backbone is replaced, so that every head, loss and metric works as it is: TRL's on its
padded batches, and heads of documents on packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...runtime import to_device, unwrap_model


class PackLayout(NamedTuple):
    """The packs of a padded batch, and where their tokens are in it."""

    packs: list[dict[str, Any]]
    """The inputs of the backbone for each pack."""
    places: Tensor
    """int64 [tokens of all packs]: the place of each token in the flat padded batch."""
    shape: tuple[int, int]
    """Rows and columns of the padded batch."""


@contextmanager
def packed_forward(model: Any, budget: int | None = None) -> Iterator[None]:
    """Compute padded rows as packs in the forwards of a model inside the block.

    Args:
        model: a causal LM or a sequence classifier of Transformers that isolates packed sequences.
        budget: tokens of a pack; default: all tokens of a batch are one pack.
    """
    with backbone_unpacked(unwrap_model(model).base_model, partial(_layout_of_mask, budget)):
        yield


@contextmanager
def backbone_unpacked(backbone: Any, layout_of: Callable[..., PackLayout]) -> Iterator[None]:
    """Let a backbone run packs inside the block, and return its outputs in the padded layout.

    layout_of: returns the packs of padded `input_ids` and their `attention_mask`.
    """
    replaced = vars(backbone).get("forward")
    if isinstance(replaced, partial) and replaced.func is unpacked_forward:
        yield  # an outer block has replaced it
        return
    backbone.forward = partial(unpacked_forward, backbone.forward, layout_of, backbone)
    try:
        yield
    finally:
        del backbone.forward
        if replaced is not None:
            backbone.forward = replaced


def unpacked_forward(
    forward: Any,
    layout_of: Callable[..., PackLayout],
    backbone: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Run a backbone on the packs of a padded batch; return its outputs in the padded layout.

    nopad's attention knows it by its name, and accepts packs in a classifier that calls it.
    """
    if attention_mask is None:
        return forward(input_ids=input_ids, **kwargs)
    kwargs.pop("margin", None)  # of a pair: TRL passes it to the model, which has no use for it
    inputs = [name for name, value in kwargs.items() if torch.is_tensor(value)]
    if input_ids is None or inputs:
        raise ValueError(
            f"{', '.join(inputs) or 'inputs without ids'} cannot be packed: train models of images "
            "and embeddings on padded batches"
        )
    packs, places, shape = layout_of(input_ids, attention_mask)
    outputs = [forward(**(kwargs | inputs)) for inputs in packs]
    fields = {
        name: _padded([output[name] for output in outputs], places, shape)
        for name in outputs[0]
        if name != "pooler_output"
    }
    if "pooler_output" in outputs[0]:  # pooled from the first sequence of each pack
        fields["pooler_output"] = _pooled(backbone, fields["last_hidden_state"])
    return type(outputs[0])(**fields)


def _pooled(backbone: Any, hidden: Tensor) -> Tensor:
    """Pool the rows of a padded batch as an encoder pools its own; ALBERT pools in two steps."""
    if isinstance(backbone.pooler, nn.Linear):
        return backbone.pooler_activation(backbone.pooler(hidden[:, 0]))
    return backbone.pooler(hidden)


def _layout_of_mask(budget: int | None, input_ids: Tensor, attention_mask: Tensor) -> PackLayout:
    """Pack the tokens that a mask shows."""
    mask, device = attention_mask.bool().cpu(), input_ids.device
    index = to_device(mask.flatten().nonzero()[:, 0], device)
    lengths = split_rows([n for n in mask.sum(1).tolist() if n], budget)
    tokens = input_ids.flatten()[index].split([sum(each) for each in lengths])
    packs = [
        {"input_ids": ids[None], **_boundaries(each, device)}
        for ids, each in zip(tokens, lengths, strict=True)
    ]
    return PackLayout(packs, index, (mask.shape[0], mask.shape[1]))


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


def _padded(values: list[Any], index: Tensor, shape: tuple[int, int]) -> Any:
    """Copy the values of all packs to the places of their tokens; router logits stay [B * L, E]."""
    if isinstance(values[0], tuple):
        return tuple(_padded(list(layer), index, shape) for layer in zip(*values, strict=True))
    if not torch.is_tensor(values[0]):
        return values[0]
    is_batched = values[0].ndim == 3
    flat = torch.cat([value.flatten(0, 1) if is_batched else value for value in values])
    padded = flat.new_zeros(shape[0] * shape[1], *flat.shape[1:]).index_copy(0, index, flat)
    return padded.unflatten(0, shape) if is_batched else padded
