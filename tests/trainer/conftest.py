"""Shared by the tests of training: equal models get the start check once in each file."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
import torch.distributed as dist
from nopad.trainer.monitoring import preflight
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture(scope="module")
def models_found_right() -> set[str]:
    return set()


@pytest.fixture(autouse=True)
def check_equal_models_once(request, models_found_right, monkeypatch):
    """Packing was found right for the same modules and rows in an earlier test: a third of a run.

    The tests of the check itself always run it.
    """
    if "monitoring" in request.path.parts:
        return
    find_fault = preflight._find_fault

    def remembered(model, *settings, **options) -> str:
        if dist.is_initialized():
            return find_fault(model, *settings, **options)
        key = description(model, *settings, options)
        fault = "" if key in models_found_right else find_fault(model, *settings, **options)
        if not fault:
            models_found_right.add(key)
        return fault

    monkeypatch.setattr(preflight, "_find_fault", remembered)


def description(model, collator, *settings) -> str:
    """What a verdict depends on: classes, hooks and dtypes of all parts, config, collator, rows."""
    parts = [
        (name, type(module), module.training, *map(len, hooks(module)))
        for name, module in model.named_modules()
    ]
    weights = [(n, p.dtype, p.shape, p.requires_grad) for n, p in model.named_parameters()]
    made = (type(collator), vars(collator) if collator is not None else None)
    return repr((parts, weights, model.config.to_dict(), made, settings))


def hooks(module):
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks


@pytest.fixture
def emulated_fp8(monkeypatch):
    """Run fp8 products on a CPU, in small layers too; graphs are traced, but not compiled."""
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def emulated_linear():
        config = Float8LinearConfig.from_recipe_name("rowwise")
        linear = nn.Linear(16, 16, device="meta")
        config = dataclasses.replace(config, emulate=True)
        return convert_to_float8_training(linear, config=config)

    names = "compile_layers", "fp8"
    modules = [importlib.import_module(f"nopad.trainer.layers.{name}") for name in names]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(modules[0], "recompute_backend", counter)
    monkeypatch.setattr(modules[1], "rowwise_linear", emulated_linear)
    monkeypatch.setattr(modules[1], "why_not_device", lambda device: "")
    monkeypatch.setattr(modules[1], "MIN_WEIGHTS", 32 * 32)
    yield counter
    torch._dynamo.reset()
