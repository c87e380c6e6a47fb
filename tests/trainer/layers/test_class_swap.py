"""Modules with a swapped class: saved, copied, patched and undone."""

from __future__ import annotations

import io
import pickle
from copy import deepcopy

import pytest
import torch
from nopad.trainer.layers.class_swap import SwappedLayers
from torch import nn


class Scaled(nn.Module):
    def __init__(self, scale: float):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(3)), scale

    def forward(self, x):
        return x * self.weight * self.scale


def doubled(module, fallback, x):
    return None if x.sum() < 0 else 2 * fallback(module, x)


def swapped_model() -> tuple[nn.Sequential, SwappedLayers]:
    model, swapped = nn.Sequential(Scaled(1.0), Scaled(3.0)), SwappedLayers()
    for module in model:
        swapped.swap(module, doubled)
    return model, swapped


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again", [saved_and_loaded, deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_swapped_model_is_saved_whole_and_copied(again):
    model, _ = swapped_model()
    other, x = again(model), torch.ones(3)
    assert [type(m) for m in other] == [type(m) for m in model]
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    assert torch.equal(other(x), model(x)) and torch.equal(model(x), 12 * x)


def test_a_forward_that_does_not_apply_leaves_the_call_to_the_module():
    model, _ = swapped_model()
    assert torch.equal(model(-torch.ones(3)), -3 * torch.ones(3))


def test_a_patch_of_the_class_that_comes_later_is_what_runs(monkeypatch):
    model, _ = swapped_model()
    monkeypatch.setattr(Scaled, "forward", lambda self, x: x + 1)
    assert torch.equal(model(torch.zeros(3)), torch.full((3,), 2.0))


def test_undo_leaves_what_something_else_has_wrapped_since():
    model, swapped = swapped_model()
    ours = type(model[1])
    wrapped = type("FSDPScaled", (ours,), {})  # as fully_shard wraps a module: by its class
    model[1].__class__ = wrapped
    with pytest.raises(ValueError, match=r"FSDPScaled.*undo before fully_shard"):
        swapped.undo()
    assert [type(module) for module in model] == [ours, wrapped]
    model[1].__class__ = ours
    swapped.undo()
    swapped.undo()
    assert [type(module) for module in model] == [Scaled, Scaled]


def test_undo_keeps_forwards_that_others_added_later():
    model, first = swapped_model()
    second = SwappedLayers()
    second.swap(model[0], lambda module, fallback, x: fallback(module, x) + 1)
    first.undo()
    assert torch.equal(model(torch.ones(3)), 3 * torch.full((3,), 2.0))
    second.undo()
    assert [type(module) for module in model] == [Scaled, Scaled]
