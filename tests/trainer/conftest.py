"""Shared by the tests of training: equal models get the start check once in each file."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from nopad.trainer.monitoring import preflight
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import pad


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
    """Multiply in fp8 on a CPU, in small layers too; graphs are traced, but not compiled.

    The counter of graphs has the shapes of all products, as (M, N, K).
    """
    pytest.importorskip("triton", reason="the products transpose by a kernel")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    counter.products = []

    def multiply(a, b, a_scale, b_scale, dtype=torch.bfloat16):
        assert not any(size % 16 for size in b.shape), "the library needs multiples of 16"
        counter.products.append((len(a), b.shape[1], len(b)))
        return ((a.float() @ b.float()) * a_scale * b_scale).to(dtype)

    def transpose(x, factors):
        padded = pad(x.float() * factors, (0, 0, 0, -len(x) % 16))
        return padded.to(torch.float8_e4m3fn).t().contiguous()

    for path, name, value in (
        ("kernels.fp8_gemm", "_multiply", multiply),
        ("kernels.fp8_gemm", "transpose", transpose),
        ("trainer.layers.compile_layers", "recompute_backend", counter),
        ("trainer.layers.fp8", "why_not_device", lambda device: ""),
        ("trainer.layers.fp8", "MIN_WEIGHTS", 32 * 32),
    ):
        monkeypatch.setattr(importlib.import_module(f"nopad.{path}"), name, value)
    yield counter
    torch._dynamo.reset()
