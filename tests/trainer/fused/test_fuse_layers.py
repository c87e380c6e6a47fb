"""Fused layers as objects: pickled and copied they stay what they are."""

from __future__ import annotations

import io
import pickle
import sys
import threading
from copy import deepcopy
from types import SimpleNamespace

import pytest
import tiny_run
import torch
from nopad.trainer.fused.class_swap import FUSED, fused_subclass, has_no_hooks, serves
from nopad.trainer.fused.equivalence import agree, agrees, wave
from nopad.trainer.fused.fuse_layers import PARTS, _different
from torch import nn

fusing = sys.modules["nopad.trainer.fused.fuse_layers"]


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
    for source in PARTS:
        for part in model.modules():
            if source.matches(part):
                part.__class__ = fused_subclass(type(part), source.forward)
    assert sum(hasattr(type(part), FUSED) for part in model.modules()) > 4 * 2
    ids = torch.randint(1, 61, (1, 9))
    gold, other = model(ids).logits, again(model)
    assert [type(part) for part in other.modules()] == [type(part) for part in model.modules()]
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    assert torch.equal(other(ids).logits, gold)


class Dropping(nn.Module):
    def __init__(self, share: float):
        super().__init__()
        self.weight, self.share = nn.Parameter(torch.ones(6)), share

    def forward(self, x):
        return nn.functional.dropout(x * self.weight, self.share, self.training)


def test_what_drops_out_in_training_is_not_fused_although_it_does_not_now():
    twin = fused_subclass(Dropping, lambda part, x: x * part.weight)
    assert agrees(Dropping(0.0).eval(), twin, torch.device("cpu"))
    assert not agrees(Dropping(0.5).eval(), twin, torch.device("cpu"))


def test_results_of_another_structure_or_dtype_do_not_agree():
    x = wave(torch.ones(1, dtype=torch.bfloat16), 9)
    assert agree(torch.sin, torch.sin, [x], [])
    assert not agree(lambda x: (x.sin(),), torch.sin, [x], []), "a tuple, and the tensor itself"
    assert not agree(lambda x: x.float().sin(), torch.sin, [x], []), "a wider result"


class Scaled(nn.Module):
    def __init__(self, scale: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        return x * self.weight * self.scale


def test_a_difference_that_bf16_would_hide_is_seen_in_fp32():
    cpu, twin = torch.device("cpu"), fused_subclass(Scaled, lambda part, x: x * part.weight)
    assert agrees(Scaled(1.0).bfloat16(), twin, cpu)
    assert not agrees(Scaled(0.99).bfloat16(), twin, cpu)


def test_what_tf32_rounds_is_forgiven_and_a_multiplier_is_not():
    x = wave(torch.ones(1), 9)
    for factor, alike in ((1.0003, True), (0.998, False)):
        assert agree(torch.sin, lambda x, factor=factor: x.sin() * factor, [x], []) == alike


def test_a_share_too_small_to_drop_anything_in_a_trial_is_seen_and_no_random_number_is_used_up():
    twin = fused_subclass(Dropping, lambda part, x: x * part.weight)
    state = torch.get_rng_state()
    assert not agrees(Dropping(1e-6), twin, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)


def test_parts_with_tensors_of_their_own_are_all_tried():
    scaled = [Scaled(share) for share in (0.2, 0.5, 1.0)]
    assert _different(scaled) == scaled
    plain = [Dropping(0.0), Dropping(0.0), Dropping(0.1)]
    assert len(_different(plain)) == 2
    plain[0].bias = torch.ones(6)
    assert len(_different(plain)) == 3


def scaled(part, x):
    return x * part.weight


@pytest.fixture
def fusible(monkeypatch):
    """Fuses `Scaled` and `Dropping`, without a kernel, here."""
    source = SimpleNamespace(
        matches=lambda part: isinstance(part, Scaled | Dropping),
        forward=scaled,
        agrees=agrees,
    )
    monkeypatch.setattr(fusing, "PARTS", [source])
    monkeypatch.setattr(fusing, "serves", lambda x: True)


def test_a_part_that_cannot_be_tried_stays_and_the_others_are_fused(fusible):
    model = nn.Sequential(Scaled(1.0), Dropping(0.0))
    model[0].lock = threading.Lock()
    assert fusing.fuse_layers(model).names == ["Dropping"]
    model = nn.Sequential(Scaled(1.0), Dropping(0.0))
    model[0].cached = model[0].weight * 2
    assert fusing.fuse_layers(model).names == ["Dropping"]
    with torch.device("meta"):
        model = nn.Sequential(Scaled(1.0))
    assert fusing.fuse_layers(model).names == []


def test_a_class_of_no_module_is_fused_as_any_other(fusible):
    class Stray(Scaled):
        __module__ = "gone.long.ago"

    assert fusing.fuse_layers(nn.Sequential(Stray(1.0))).names == ["Stray"]


def test_a_failure_half_way_leaves_nothing_fused(fusible, monkeypatch):
    monkeypatch.setattr(fusing, "_fuse_rotary", lambda *_: 1 / 0)
    model = nn.Sequential(Scaled(1.0))
    with pytest.raises(ZeroDivisionError):
        fusing.fuse_layers(model)
    assert type(model[0]) is Scaled


def test_undo_leaves_what_something_else_has_wrapped_since(fusible):
    model = nn.Sequential(Scaled(1.0), Scaled(1.0))
    fused = fusing.fuse_layers(model)
    twin = type(model[1])
    wrapped = type("FSDPScaled", (twin,), {})  # as fully_shard wraps a module: by its class
    model[1].__class__ = wrapped
    with pytest.raises(ValueError, match=r"FSDPScaled.*undo before fully_shard"):
        fused.undo()
    assert [type(part) for part in model] == [twin, wrapped] and fused.names == ["Scaled"]
    model[1].__class__ = twin
    fused.undo()
    fused.undo()
    assert [type(part) for part in model] == [Scaled, Scaled] and fused.names == []


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_any_kind_keeps_a_module_from_being_passed_over(name):
    part = nn.Linear(2, 2)
    assert has_no_hooks(part)
    everywhere = getattr(nn.modules.module, name.replace("register_", "register_module_"))
    for register in (getattr(part, name), everywhere):
        handle = register(lambda *_: None)
        assert not has_no_hooks(part)
        handle.remove()
        assert has_no_hooks(part)


def test_the_kernels_are_for_tensors_of_the_current_device_only(monkeypatch):
    class Away(torch.Tensor):
        is_cuda = True

        def get_device(self):
            return 1

    x = torch.zeros(3).as_subclass(Away)
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert serves(x) == (current == 1)
    assert not serves(torch.zeros(3)) and not serves(None)


def test_angles_that_learn_are_turned_by_the_model_itself():
    q, angles = torch.randn(1, 2, 3, 4), torch.randn(1, 3, 4)
    assert fusing._usual(q, q, angles, angles)
    learnt = angles.clone().requires_grad_()
    assert not fusing._usual(q, q, learnt, angles) and not fusing._usual(q, q, angles, learnt)
