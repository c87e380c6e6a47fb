"""Fused layers as objects: pickled and copied they stay what they are."""

from __future__ import annotations

import io
import pickle
from copy import deepcopy

import pytest
import tiny_run
import torch
from nopad.trainer.fusing import _mlp, _norm, _twin


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again", [saved_and_loaded, deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_fused_model_is_saved_whole_and_copied(again):
    model = tiny_run.model()
    kinds = {"LlamaRMSNorm": _norm, "LlamaMLP": _mlp}
    for part in model.modules():
        if type(part).__name__ in kinds:
            part.__class__ = _twin(type(part), kinds[type(part).__name__])
    ids = torch.randint(1, 61, (1, 9))
    gold, other = model(ids).logits, again(model)
    assert [type(part) for part in other.modules()] == [type(part) for part in model.modules()]
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    assert torch.equal(other(ids).logits, gold)
