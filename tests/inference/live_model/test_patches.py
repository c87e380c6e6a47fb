"""Patches are applied and restored without a trace."""

from __future__ import annotations

import copy

import pytest
import torch
from nopad.inference import Engine, SamplingParams
from nopad.inference.fused.fused_ops import FusedOps
from nopad.inference.fused.stacked_weights import StackedWeights
from nopad.inference.live_model.patches import Patches
from torch import nn


def double(x):
    return 2 * x


def test_stand_ins_go_and_come_back():
    module, patches, restored = nn.Identity(), Patches(), []
    patches.set(module, "forward", lambda x: x + 1)
    patches.set(module, "forward", lambda x: x + 2)
    patches.on_restore(lambda: restored.append(1))
    assert module(1) == 3
    patches.restore()
    assert module(1) == 1 and "forward" not in vars(module) and restored == [1]
    assert patches.reapply() and module(1) == 3
    patches.restore()
    assert module(1) == 1 and restored == [1, 1]


def test_what_someone_put_in_meanwhile_stays():
    module, other, patches = nn.Identity(), nn.Identity(), Patches()
    patches.set(other, "forward", lambda x: x + 1)
    patches.set(module, "forward", lambda x: x + 1)
    patches.restore()
    module.forward = double
    assert not patches.reapply()
    assert module(3) == 6 and other(3) == 3


def test_patches_are_built_again_only_after_they_were_dropped_or_replaced():
    module, calls, refreshed = nn.Identity(), [], []

    def op(modules, patches):
        calls.append(1)
        patches.on_refresh(lambda: refreshed.append(1))
        for each in modules:
            patches.set(each, "forward", lambda x: x + 1)

    fused = FusedOps([op])
    for refresh in (True, False, True):
        with fused.active([module], refresh):
            assert module(1) == 2
        assert module(1) == 1
    assert (calls, refreshed) == ([1], [1])
    module.forward = double
    with fused.active([module], False):
        assert module(3) == 6
    assert calls == [1, 1] and module(3) == 6
    del module.forward
    fused.drop_patches()
    with fused.active([module], False):
        assert module(1) == 2
    assert (calls, refreshed) == ([1, 1, 1], [1])


def test_a_call_inside_another_leaves_no_patch():
    module = nn.Identity()
    fused = FusedOps([lambda modules, patches: patches.set(module, "forward", lambda x: x + 1)])
    for _ in range(2):
        with fused.active([module]):
            fused.drop_patches()
            with fused.active([module]):
                assert module(1) == 2
        assert module(1) == 1 and "forward" not in vars(module)


def test_a_refresh_that_fails_leaves_no_patch():
    module = nn.Identity()

    def op(modules, patches):
        patches.set(module, "forward", lambda x: x + 1)
        patches.on_refresh(lambda: 1 // 0)

    fused = FusedOps([op])
    with fused.active([module]):
        pass
    with pytest.raises(ZeroDivisionError), fused.active([module]):
        pass
    assert module(1) == 1


def test_copies_of_weights_follow_writes_that_no_counter_shows(tiny):
    model = copy.deepcopy(tiny("llama"))
    attn, fused = model.model.layers[1].self_attn, FusedOps([StackedWeights()])
    x = torch.ones(1, 1, attn.q_proj.in_features)
    for _ in range(3):
        want = [nn.functional.linear(x, p.weight) for p in (attn.q_proj, attn.k_proj, attn.v_proj)]
        with fused.active(list(model.modules())), torch.no_grad():
            got = [p(x) for p in (attn.q_proj, attn.k_proj, attn.v_proj)]
        torch.testing.assert_close(got, want)
        attn.k_proj.weight.data[3] += 1


def test_an_engine_drops_patches_when_the_weights_change_or_move(tiny, monkeypatch):
    model = copy.deepcopy(tiny("llama"))
    engine, dropped = Engine(model, page_size=16), []
    monkeypatch.setattr(FusedOps, "drop_patches", lambda _: dropped.append(1))
    weight = model.model.norm.weight

    def num_dropped() -> int:
        dropped.clear()
        engine.generate([[3, 4]], SamplingParams(temperature=0, max_tokens=2))
        return len(dropped)

    num_dropped()
    assert num_dropped() == 0
    with torch.no_grad():
        weight.add_(1)
    assert num_dropped() == 1 and num_dropped() == 0
    weight.data = weight.data.clone()
    assert num_dropped() == 1 and num_dropped() == 0
