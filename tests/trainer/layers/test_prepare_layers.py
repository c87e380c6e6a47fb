"""Which layers train: by model, machine and settings, and as the checkpoint says."""

from __future__ import annotations

import shutil

import pytest
import tiny_run
import torch
from nopad.runtime import Axis, Layout
from nopad.trainer.layers import SwappedLayers, compile_layers, prepare_layers
from nopad.trainer.layers.experts import group_experts
from nopad.trainer.layers.prepare_layers import choose

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layers", "saved", "obstacle", "device", "expected"),
    [
        ("auto", None, "", "cuda", "compiled"),
        ("auto", None, "", "cpu", "stock"),
        ("auto", None, "no compiler", "cuda", "stock"),
        ("auto", "stock", "", "cuda", "stock"),
        ("auto", "compiled", "", "cpu", "compiled"),
        ("stock", None, "", "cuda", "stock"),
        ("stock", "compiled", "", "cuda", "stock"),
        ("compiled", "stock", "", "cuda", "compiled"),
    ],
)
def test_the_rule(layers, saved, obstacle, device, expected):
    way, note = choose(layers, saved, obstacle, device)
    assert way == expected
    assert ("the checkpoint was trained with" in note) == (saved not in (None, way))
    assert obstacle in note


def test_a_choice_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"^layers='fused': use one of 'auto', 'compiled', 'sto"):
        prepare_layers(tiny_run.model(), CPU, "fused")


def test_without_a_compiler_layers_stay_stock_and_compiled_ones_are_refused(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model = tiny_run.model()
    assert prepare_layers(model, CPU).describe() == "stock layers"
    resumed = prepare_layers(model, CPU, saved="compiled")
    note = "the checkpoint was trained with compiled layers"
    assert resumed.way == "stock" and note in resumed.describe()
    with pytest.raises(ValueError, match=r"^layers='compiled': no C compiler was found; use layer"):
        prepare_layers(model, CPU, "compiled")


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        (lambda: tiny_run.model("sdpa"), Layout(), "attn_implementation='sdpa', not 'nopad'"),
        (tiny_run.model, Layout(0, 2, sequence=Axis(1, 2)), "ranks share rows or weights"),
        (tiny_run.model, Layout(0, 2, tensor=Axis(1, 2)), "ranks share rows or weights"),
    ],
)
def test_what_cannot_be_compiled_is_told(model, layout, reason):
    with pytest.raises(ValueError, match=f"^layers='compiled': {reason}"):
        prepare_layers(model(), CPU, "compiled", layout=layout)


def test_quantized_experts_run_as_they_are_and_are_told():
    model = tiny_run.mixture()
    classes = [type(module) for module in model.modules()]
    experts = model.model.layers[1].mlp.experts
    quantized = experts.down_proj.detach().to(torch.float8_e4m3fn)
    experts.down_proj = torch.nn.Parameter(quantized, requires_grad=False)
    told = r"their experts are quantized \(1.mlp.experts.down_proj is torch.float8_e4m3fn\)"
    with pytest.raises(ValueError, match=f"^layers='compiled': {told}; use layers='auto'$"):
        prepare_layers(model, CPU, "compiled")
    assert prepare_layers(model, CPU, saved="compiled").way == "stock"
    swapped = SwappedLayers()
    group_experts(model.model.layers[1], swapped, CPU)
    assert [type(module) for module in model.modules()] == classes


def test_layers_that_are_compiled_already_stay_as_they_are():
    model = tiny_run.model()
    compile_layers(model, backend="eager")
    classes = [type(module) for module in model.modules()]
    assert prepare_layers(model, CPU).describe() == "compiled layers"
    assert [type(module) for module in model.modules()] == classes
    told = prepare_layers(model, CPU, saved="stock").describe()
    assert told == "compiled layers (the checkpoint was trained with stock layers)"
    with pytest.raises(
        ValueError, match=r"^layers='stock', but .* are compiled already: call undo"
    ):
        prepare_layers(model, CPU, "stock")


def test_layers_that_torch_compile_cannot_trace_train_as_they_are(monkeypatch):
    batch = tiny_run.collate(tiny_run.packs(tiny_run.dataset(), 1)[0])
    stock = tiny_run.model()
    name = type(stock.model.layers[0])
    original = name.forward

    def with_a_graph_break(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(name, "forward", with_a_graph_break)
    model = tiny_run.model()
    layers = prepare_layers(model, CPU, saved="compiled")
    assert torch.equal(model(**batch).loss, stock(**batch).loss)
    assert layers.way == "stock" and "torch.compile failed: Unsupported" in layers.describe()
    model = tiny_run.model()
    prepare_layers(model, CPU, "compiled")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        model(**batch)
