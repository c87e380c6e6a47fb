"""Choose the layers that a model trains with: compiled, or its own.

    "auto"        compiled on a GPU, where nothing speaks against it; else stock
    "compiled"    compiled, or an error that says why not
    "stock"       the model's own

The choice depends on model, machine and settings, never on timings. Checkpoints hold it, and a
resumed run keeps it: compiled layers round differently.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ...attention.hf import ATTN_IMPLEMENTATION
from ...runtime import Layout
from ..banner import print_banner
from .class_swap import SwappedLayers
from .compile_layers import (
    CompiledForward,
    compile_with,
    compiled_forward,
    graph_options,
    why_not_compiled,
)
from .experts import group_experts

COMPILED, STOCK = "compiled", "stock"
LAYERS = "auto", COMPILED, STOCK


class PreparedLayers:
    """The layers that a model trains with."""

    def __init__(self, swapped: SwappedLayers, note: str = "", forward: Any = None):
        self.swapped, self._note, self._forward = swapped, note, forward

    @property
    def way(self) -> str:
        """Say what they are: "compiled" or "stock"."""
        return STOCK if self._forward is None or self._forward.failure else COMPILED

    def describe(self) -> str:
        """Return a phrase for the banner.

        >>> PreparedLayers(SwappedLayers(), "no C compiler was found").describe()
        'stock layers (no C compiler was found)'
        """
        failure = "" if self._forward is None else self._forward.failure
        note = f"torch.compile failed: {failure}" if failure else self._note
        return f"{self.way} layers" + (f" ({note})" if note else "")


def prepare_layers(
    model: nn.Module,
    device: torch.device,
    layers: str = "auto",
    *,
    saved: str | None = None,
    obstacle: str = "",
    layout: Layout | None = None,
) -> PreparedLayers:
    """Compile the decoder layers of a causal LM, or leave them as they are.

    On a GPU, "auto" runs the experts of stock layers by grouped products, too.

    Args:
        model: a causal LM of Transformers.
        device: the one on which it will train.
        layers: "auto", "compiled" or "stock".
        saved: what the checkpoint was trained with, for a run that is resumed.
        obstacle: why this trainer cannot compile them; "" if it can.
        layout: the ranks that share rows or weights.
    """
    if layers not in LAYERS:
        raise ValueError(f"layers={layers!r}: use one of {', '.join(map(repr, LAYERS))}")
    swapped = SwappedLayers()
    if (forward := compiled_forward(model)) is not None:  # by an earlier call
        if layers == STOCK:
            raise ValueError(
                "layers='stock', but the layers of this model are compiled already: call undo() of "
                "the result of compile_layers, or of the earlier trainer's prepared_layers.swapped"
            )
        return PreparedLayers(swapped, choose(COMPILED, saved, "", device.type)[1], forward)
    obstacle = obstacle or why_not_compiled(model) or _missing(model, device, layout or Layout())
    if layers == COMPILED and obstacle:
        raise ValueError(f"layers='compiled': {obstacle}; use layers='auto'")
    way, note = choose(layers, saved, obstacle, device.type)
    if way == COMPILED:
        forward = CompiledForward(graph_options(model), falls_back=layers != COMPILED)
        swapped = compile_with(forward, model, device)
        if device.type == "cuda":
            print_banner(["compiling layers: up to a minute for the first step, less once cached"])
    elif layers != STOCK and device.type == "cuda":
        group_experts(model, swapped, device)
    return PreparedLayers(swapped, note, forward)


def choose(layers: str, saved: str | None, obstacle: str, device: str) -> tuple[str, str]:
    """Return the layers to train with, and a note on them.

    >>> choose("auto", None, "", "cuda"), choose("auto", None, "", "cpu")
    (('compiled', ''), ('stock', ''))
    >>> choose("auto", "compiled", "no C compiler was found", "cuda")
    ('stock', 'no C compiler was found; the checkpoint was trained with compiled layers')
    """
    way, notes = layers, []
    if layers == "auto":
        way = STOCK if obstacle else saved or (COMPILED if device == "cuda" else STOCK)
        notes = [obstacle] if obstacle and device == "cuda" else []
    if saved not in (None, way):
        notes.append(f"the checkpoint was trained with {saved} layers")
    return way, "; ".join(notes)


def trained_layers(prepared: Iterable[PreparedLayers], saved: str | None) -> str | None:
    """Return what a checkpoint says of the layers of all models: compiled if those of one are.

    saved: of the run that was loaded, if no model is prepared yet.
    """
    ways = [layers.way for layers in prepared]
    return (COMPILED if COMPILED in ways else STOCK) if ways else saved


def _missing(model: Any, device: torch.device, layout: Layout) -> str:
    """Return what compiled layers need and do not have; "" if nothing."""
    attention = model.config.get_text_config()._attn_implementation
    if attention != ATTN_IMPLEMENTATION:
        return f"attn_implementation={attention!r}, not {ATTN_IMPLEMENTATION!r}"
    if layout.replica_size > 1:
        return "ranks share rows or weights"
    if device.type == "cuda" and find_spec("triton") is None:
        return "Triton is not installed"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "no C compiler was found"
    return ""


def sharding_obstacle(accelerator: Any) -> str:
    """Return why layers that an Accelerator shards cannot be compiled; "" if they can."""
    kind = accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        return "DeepSpeed gathers weights inside of layers"
    if kind == "FSDP" and accelerator.state.fsdp_plugin.fsdp_version == 1:
        return "FSDP1 changes the weights of layers; FSDP2 does not"
    return ""
