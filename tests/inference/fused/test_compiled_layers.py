"""Compiled layers, without a GPU: the graphs of torch.compile, and which steps they compute."""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Any

import pytest
import torch
from nopad.attention import PagedCache, layer_shapes
from nopad.attention.hf import StatePool, stateful_parts
from nopad.cli.tiny_model import randomize_weights, tiny_config
from nopad.inference.fused import fused_ops
from nopad.inference.fused.compiled_layers import CompiledLayers
from nopad.inference.fused.gated_products import gated_products
from nopad.inference.fused.state_kernels import CONV, DELTA_RULE
from nopad.inference.live_model.patches import Patches
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_next import modeling_qwen3_next

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytestmark = [
    pytest.mark.usefixtures("small_delta_rules"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted on a GPU"),
]
SLOWLY = pytest.mark.slow
KINDS = [
    "bamba",
    "lfm2",
    "gemma3_text",
    "olmo2",
    *(
        pytest.param(kind, marks=SLOWLY)
        for kind in ("qwen3_5_text", "qwen3_next", "granitemoehybrid", "qwen3_moe")
    ),
]


def build(kind: str, layers: int) -> Any:
    torch.manual_seed(0)
    config = tiny_config(CONFIG_MAPPING[kind](), layers)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize_weights(model)
    return model


def verified(model: Any) -> list[fused_ops.FusedOp]:
    """Return what replaces parts of a model; in decode steps, if it keeps states."""
    cache = PagedCache(1, 16, layer_shapes(model), torch.float32, "cpu")
    stateful = stateful_parts(model)
    states = StatePool(stateful, 3, "cpu") if stateful else None
    return fused_ops.verified_ops(model, cache, 8, states)


def verified_names(model: Any) -> list[str]:
    return [op.__name__ for op in verified(model)]


def compile_eagerly(monkeypatch: Any) -> None:
    monkeypatch.setattr(fused_ops, "CompiledLayers", partial(CompiledLayers, backend="eager"))


def count_graphs(kind: str, layers: int, monkeypatch: Any) -> int:
    """Compile the layers of a model, compare the logits, and return the number of graphs."""
    model = build(kind, layers)
    numbers = [vars(module).get("layer_idx") for module in model.modules()]
    torch._dynamo.reset()
    counters.clear()
    compile_eagerly(monkeypatch)
    assert "compiled layers" in verified_names(model)
    assert [vars(module).get("layer_idx") for module in model.modules()] == numbers
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_holds_for_all_layers_of_a_kind(kind, monkeypatch):
    few, many = (count_graphs(kind, layers, monkeypatch) for layers in (4, 8))
    assert 0 < many == few


@pytest.mark.parametrize("name", [CONV, DELTA_RULE])
def test_functions_that_compute_something_else_are_not_replaced(name, monkeypatch):
    """The logits of a short trial would not show a difference this small."""
    stock = inspect.unwrap(getattr(modeling_qwen3_next, name))

    def other(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        return out * 1.001 if name == CONV else (out[0] * 1.001, out[1])

    model = build("qwen3_next", 4)
    monkeypatch.setattr(fused_ops, "CompiledLayers", WrongLayers)
    assert "kernels for states" in verified_names(model)
    monkeypatch.setattr(modeling_qwen3_next, name, other)
    assert "kernels for states" not in verified_names(model)


def test_mlps_that_compute_something_else_or_are_watched_stay_stock():
    model = build("qwen3_5_text", 2)
    first, second = (module for module in model.modules() if hasattr(module, "gate_proj"))
    second.gate_proj.forward = partial(nn.Linear.forward, second.gate_proj)
    patches = Patches()
    gated_products(list(model.modules()), patches)
    assert "forward" in vars(first) and "forward" not in vars(second)
    patches.restore()
    falcon = build("falcon_h1", 2)  # multiplies the product of its gate
    with pytest.raises(AssertionError, match="no plain gated MLP"):
        gated_products(list(falcon.modules()), patches)


def test_layers_that_compute_something_else_stay_stock(monkeypatch):
    monkeypatch.setattr(fused_ops, "CompiledLayers", WrongLayers)
    assert "compiled layers" not in verified_names(build("bamba", 4))


class WrongLayers(CompiledLayers):
    """A compilation that loses what a layer adds to its input."""

    def __init__(self, stateful: Any = ()):
        super().__init__(stateful, backend="eager")
        self._compiled = lambda stock: lambda layer, x, *args, **kwargs: x


def no_compiler(*_: Any, **__: Any) -> Any:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    return fail


def test_layers_that_cannot_be_compiled_stay_stock(monkeypatch):
    monkeypatch.setattr(torch, "compile", no_compiler)
    assert "compiled layers" not in verified_names(build("lfm2", 4))


def test_layers_that_are_not_fused_by_hand_are_compiled_and_the_log_says_why(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    compile_eagerly(monkeypatch)
    assert verified_names(build("gemma3_text", 2)) == ["stacked projections", "compiled layers"]
    assert "compiled layers (layers of Gemma3)" in caplog.text
    monkeypatch.setattr(torch, "compile", no_compiler)
    assert "rotary" in verified_names(build("gemma3_text", 2))
    assert "stock layers" in caplog.text
