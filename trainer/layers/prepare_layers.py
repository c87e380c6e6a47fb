"""Choose the layers that a model trains with: compiled, or its own.

    "auto"        compiled on a GPU, where nothing speaks against it; else stock
    "compiled"    compiled, or an error that says why not
    "stock"       the model's own

Compiled layers may multiply in fp8.

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
from .fp8 import why_not_fp8

COMPILED, STOCK, FP8 = "compiled", "stock", "fp8"
LAYERS = "auto", COMPILED, STOCK


class PreparedLayers:
    """The layers that a model trains with."""

    def __init__(self, swapped: SwappedLayers, note: str = "", forward: Any = None):
        self.swapped, self._note, self._forward = swapped, note, forward

    @property
    def way(self) -> str:
        """Say what they are: "compiled", "stock", or "fp8", which are compiled too."""
        if self._forward is None or self._forward.failure:
            return STOCK
        return FP8 if self._forward.fp8 else COMPILED

    def describe(self) -> str:
        """Return a phrase for the banner.

        >>> PreparedLayers(SwappedLayers(), "no C compiler was found").describe()
        'stock layers (no C compiler was found)'
        """
        failure = "" if self._forward is None else self._forward.failure
        note = f"torch.compile failed: {failure}" if failure else self._note
        layers = f"{COMPILED} layers with fp8 products" if self.way == FP8 else f"{self.way} layers"
        return layers + (f" ({note})" if note else "")


def prepare_layers(
    model: nn.Module,
    device: torch.device,
    layers: str = "auto",
    *,
    fp8: bool = False,
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
        fp8: multiply in fp8 while training.
        saved: what the checkpoint was trained with, for a run that is resumed.
        obstacle: why this trainer cannot compile them; "" if it can.
        layout: the ranks that share rows or weights.
    """
    if layers not in LAYERS:
        raise ValueError(f"layers={layers!r}: use one of {', '.join(map(repr, LAYERS))}")
    swapped = SwappedLayers()
    if (forward := compiled_forward(model)) is not None:  # by an earlier call
        _refuse_others(forward.fp8, layers, fp8)
        note = choose(COMPILED, saved, "", device.type, fp8)[1]
        return PreparedLayers(swapped, note, forward)
    obstacle = obstacle or why_not_compiled(model) or _missing(model, device, layout or Layout())
    if layers == COMPILED and obstacle:
        raise ValueError(f"layers='compiled': {obstacle}; use layers='auto'")
    options = graph_options(model)
    if fp8:
        stock = "only compiled layers are faster in fp8" if layers == STOCK else ""
        cut = "" if options["fullgraph"] else "modules with a state cut the graphs of its layers"
        if reason := stock or obstacle or cut or why_not_fp8(model, device):
            raise ValueError(f"fp8=True: {reason}; omit fp8")
    way, note = choose(layers, saved, obstacle, device.type, fp8)
    if way != STOCK:
        forward = CompiledForward(options, falls_back=layers != COMPILED and not fp8, fp8=fp8)
        swapped = compile_with(forward, model, device)
        if device.type == "cuda":
            print_banner(["compiling layers: 10 to 30 s before the first step, less once cached"])
    elif layers != STOCK and device.type == "cuda":
        group_experts(model, swapped, device)
    return PreparedLayers(swapped, note, forward)


def _refuse_others(has_fp8: bool, layers: str, fp8: bool) -> None:
    """Raise if a run wants other layers than those that are compiled already."""
    undo = "call undo() of the result of compile_layers, or of the earlier trainer's "
    undo += "prepared_layers.swapped"
    if layers == STOCK:
        raise ValueError(
            f"layers='stock', but the layers of this model are compiled already: {undo}"
        )
    if fp8 != has_fp8:
        raise ValueError(
            f"fp8={fp8}, but the layers of this model are compiled already with fp8={has_fp8}: "
            f"{undo}"
        )


def choose(
    layers: str, saved: str | None, obstacle: str, device: str, fp8: bool = False
) -> tuple[str, str]:
    """Return the layers to train with, and a note on them.

    >>> choose("auto", None, "", "cuda"), choose("auto", None, "", "cpu")
    (('compiled', ''), ('stock', ''))
    >>> choose("auto", "compiled", "no C compiler was found", "cuda")
    ('stock', 'no C compiler was found; the checkpoint was trained with compiled layers')
    """
    way, notes = layers, []
    if layers == "auto":
        compiles = device == "cuda" if saved is None else saved != STOCK
        way = COMPILED if compiles and not obstacle else STOCK
        notes = [obstacle] if obstacle and device == "cuda" else []
    way = FP8 if fp8 else way
    if saved not in (None, way):
        notes.append(f"the checkpoint was trained with {saved} layers")
    return way, "; ".join(notes)


def trained_layers(prepared: Iterable[PreparedLayers], saved: str | None) -> str | None:
    """Return what a checkpoint says of the layers of all models: compiled if those of one are.

    saved: of the run that was loaded, if no model is prepared yet.
    """
    ways = {layers.way for layers in prepared}
    return next((way for way in (FP8, COMPILED, STOCK) if way in ways), saved)


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
