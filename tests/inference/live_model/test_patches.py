"""Patches are applied and restored without a trace."""

from __future__ import annotations

from nopad.inference.fused.fused_ops import FusedOps
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


def test_parts_are_put_in_anew_only_for_other_weights_or_a_changed_model():
    module, calls = nn.Identity(), []

    def op(modules, patches, stale):
        calls.append(stale)
        for each in modules:
            patches.set(each, "forward", lambda x: x + 1)

    fused = FusedOps([op])
    for stale in (True, False, False):
        with fused.active([module], stale):
            assert module(1) == 2
        assert module(1) == 1
    assert calls == [True]
    module.forward = double
    with fused.active([module], False):
        assert module(3) == 6
    assert calls == [True, False] and module(3) == 6
    del module.forward
    with fused.active([module], True):
        assert module(1) == 2
    assert calls == [True, False, True]
