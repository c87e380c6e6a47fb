"""Which models the attention function can serve, and the shapes of their caches."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..varlen import Varlen
from .call_log import recording
from .forward_context import forward_context

_STATE = "keeps a recurrent or convolutional state beside attention ({}), which is not paged"
_REFUSED_TYPES = {
    "deepseek_v4": "keeps a compressed cache of its own",
    "diffllama": "attends twice per layer under one layer index",
    "hrm_text": "runs its layers more than once per step",
    "inkling_text": "adds a position bias inside attention",
    "doge": "computes its mask from the values",
    "git": "chooses its attention from a table of its own",
}
_STATEFUL = (
    "Mamba", "GatedDelta", "DeltaNet", "ShortConv", "Recurrent", "LinearAttention",
    "LightningAttention", "KimiDelta", "Rwkv", "xLSTM", "mLSTM", "CCA",
)  # fmt: skip
_SPARSE = ("Indexer",)
_STATEFUL_KINDS = ("linear", "mamba", "conv", "recurrent")
_REFUSED_TYPES |= dict.fromkeys(
    (
        "camembert",
        "data2vec-text",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
    ),
    "counts its positions from pad_token_id + 1, a packed batch counts from 0",
)


def unsupported_reason(model: Any) -> str | None:
    """Say why a model cannot run with attn_implementation="nopad"; None: nothing is against it."""
    config = model.config
    kind = getattr(config, "model_type", type(model).__name__)
    if kind in _REFUSED_TYPES:
        return f"{kind} {_REFUSED_TYPES[kind]}"
    if not _uses_interface(model):
        return f"{kind} does not use the attention interface of Transformers"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{kind} takes no position_ids: its positions would run on through a pack"
    for layer in getattr(config, "layer_types", None) or ():
        if any(word in layer for word in _STATEFUL_KINDS):
            return f"{kind} " + _STATE.format(layer)
    for module in model.modules():
        name = type(module).__name__
        if any(word in name for word in _STATEFUL):
            return f"{kind} " + _STATE.format(name)
        if any(word in name for word in _SPARSE):
            return f"{kind} chooses keys by an index ({name}), which needs a written-out mask"
    if getattr(config, "is_causal", True) is False:
        return f"{kind} is configured as not causal"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return f"{kind} attends in both directions (use_bidirectional_attention)"
    return None


def check_supported(model: Any) -> None:
    """Raise with the reason if a model cannot be served."""
    reason = unsupported_reason(model)
    if reason is not None:
        raise ValueError(f"nopad cannot run this model: {reason}")


def layer_shapes(model: Any) -> list[tuple[int, int, int]]:
    """(Hkv, Dk, Dv) of every layer, as one dummy token shows them to the attention function."""
    before = model.config._attn_implementation
    if before != "nopad":
        model.set_attn_implementation("nopad")
    device = next(model.parameters()).device
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    varlen = Varlen(torch.tensor([0, 1], dtype=torch.int32, device=device), 1)
    try:
        with eval_mode(model), torch.no_grad(), recording() as witness, forward_context(varlen):
            model(input_ids=token, position_ids=token, use_cache=False, varlen=varlen)
    finally:
        if before != "nopad":
            model.set_attn_implementation(before)
    shapes = {layer: shape for layer, _, shape in witness.calls}
    if sorted(shapes) != list(range(len(shapes))) or len(shapes) != len(witness.calls):
        layers = sorted(layer for layer, _, _ in witness.calls)
        raise ValueError(f"{type(model).__name__}: attention was called for layers {layers}")
    return [shapes[layer] for layer in range(len(shapes))]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation, and back into the mode each one was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _uses_interface(model: nn.Module) -> bool:
    files = {type(module).__module__ for module in model.modules()}
    models = [sys.modules[f] for f in files if ".modeling_" in f]
    return any(hasattr(m, "ALL_ATTENTION_FUNCTIONS") for m in models)
