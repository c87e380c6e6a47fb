"""Shared by the tests of training: equal models get the start check once in each file."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from nopad.trainer.monitoring import preflight


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
