"""Pass the boundaries of documents to stock masks and to layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from ...attention import Varlen, document_mask, forward_context
from ...attention.hf import (
    convolve_by_document,
    declared_state,
    decoder_layers,
    pass_boundaries,
    run_by_document,
    stateful_modules,
)
from ..layers.class_swap import SwappedLayers


def reset_states(model: Any) -> tuple[bool, SwappedLayers]:
    """Reset the state that modules of a causal LM carry on, at every document of packed rows.

    Returns whether the model has a state at all, and these modules; named are those that run
    document by document. Those whose kernels read the boundaries stay as they are.
    """
    reset, trial = SwappedLayers(), SwappedLayers()
    if declared_state(model) is None:
        return False, reset
    found = stateful_modules(model)
    for module in found:
        trial.swap(module, convolve_by_document)
    with_state = set(stateful_modules(model)) if found else set()
    trial.undo()
    for module in found:
        if module not in with_state:
            reset.swap(module, convolve_by_document)
            continue
        reset.swap(module, run_by_document)
        reset.add_name(type(module).__name__)
    for layer in decoder_layers(model) if found else ():
        if not {*layer.children()}.isdisjoint(found):
            reset.swap(layer, pass_boundaries)
    return True, reset


@contextmanager
def document_contexts(loss: Any, cu_seqlens: Tensor, tokens: int) -> Iterator[None]:
    """Pass the boundaries of a row to the stock masks and to layers with a state inside.

    loss: the attached loss of the model; tokens: of the row.
    """
    with ExitStack() as contexts:
        if loss.mask_documents:
            contexts.enter_context(document_mask(cu_seqlens, tokens))
        if loss.needs_context:
            contexts.enter_context(forward_context(Varlen(cu_seqlens, tokens), loss.model))
        yield
