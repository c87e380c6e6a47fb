"""Compiled decode steps of models with states, without a GPU: the graphs of torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nopad.attention import PagedCache, layer_shapes
from nopad.attention.hf import StatePool, stateful_parts
from nopad.cli.tiny_model import randomize_weights, tiny_config
from nopad.inference.fused import fused_ops
from nopad.inference.fused.compiled_layers import CompiledLayers
from nopad.inference.live_model.borrow import borrow_model
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SLOWLY = pytest.mark.slow
KINDS = [
    "bamba",
    "lfm2",
    *(
        pytest.param(kind, marks=SLOWLY)
        for kind in ("qwen3_5_text", "qwen3_next", "granitemoehybrid")
    ),
]


def build(kind: str, layers: int) -> Any:
    torch.manual_seed(0)
    config = tiny_config(CONFIG_MAPPING[kind](), layers)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize_weights(model)
    return model


def parts(model: Any) -> tuple[PagedCache, StatePool]:
    cache = PagedCache(1, 16, layer_shapes(model), torch.float32, "cpu")
    return cache, StatePool(stateful_parts(model), 3, "cpu")


def count_graphs(kind: str, layers: int) -> int:
    """Compile the layers of a model, compare the logits, and return the number of graphs."""
    model = build(kind, layers)
    cache, states = parts(model)
    numbers = [vars(module).get("layer_idx") for module in model.modules()]
    torch._dynamo.reset()
    counters.clear()
    with borrow_model(model):
        expected = fused_ops._trial_logits(model, cache, states)
        assert not counters
        compiled = CompiledLayers(states.modules, backend="eager")
        assert fused_ops._matches_model(model, [compiled], expected, cache, states)
    assert [vars(module).get("layer_idx") for module in model.modules()] == numbers
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_holds_for_all_layers_of_a_kind(kind):
    few, many = count_graphs(kind, 4), count_graphs(kind, 8)
    assert 0 < many == few


def test_layers_that_compute_something_else_stay_stock(monkeypatch):
    model = build("bamba", 4)
    cache, states = parts(model)
    monkeypatch.setattr(fused_ops, "CompiledLayers", WrongLayers)
    assert fused_ops._verified_layers(model, cache, states) == []


class WrongLayers(CompiledLayers):
    """A compilation that loses what a layer adds to its input."""

    def __init__(self, stateful: Any):
        super().__init__(stateful, backend="eager")
        self._compiled = lambda stock: lambda layer, x, *args, **kwargs: x


def test_layers_that_cannot_be_compiled_stay_stock(monkeypatch):
    model = build("lfm2", 4)
    cache, states = parts(model)

    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    assert fused_ops._verified_layers(model, cache, states) == []
