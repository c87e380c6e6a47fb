"""Weights are cast once per optimizer step, and never stale."""

from __future__ import annotations

import gc
import weakref
from typing import ClassVar

import pytest
import torch
from nopad.runtime import cast_weight
from torch import nn
from torch.utils.checkpoint import checkpoint

BF16 = torch.bfloat16


class Scale(torch.autograd.Function):
    """x · weight, which notes every copy of the weight that it is given."""

    copies: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x, weight, copy):
        ctx.save_for_backward(x, copy)
        return x * copy.float()

    @staticmethod
    def backward(ctx, d):
        x, copy = ctx.saved_tensors
        return d * copy.float(), d * x, None


def scale(x, weight):
    Scale.copies.append(cast_weight(weight, BF16))
    return Scale.apply(x, weight, Scale.copies[-1])


@pytest.fixture
def weight():
    Scale.copies.clear()
    return nn.Parameter(torch.tensor([1.0, 2.0]))


def micro_batches(weight: nn.Parameter, count: int) -> int:
    """Run some micro-batches, and return how many copies of the weight they made."""
    Scale.copies.clear()
    for _ in range(count):
        scale(torch.ones(2, requires_grad=True), weight).sum().backward()
    return len({id(copy) for copy in Scale.copies})


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_micro_batches_of_a_step_share_one_copy(weight, set_to_none):
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for step in range(3):
        expected = 2 if step == 0 else 1  # the first step shows that gradients are accumulated
        assert micro_batches(weight, 4) == expected
        assert torch.equal(Scale.copies[-1], weight.to(BF16))
        kept = weakref.ref(Scale.copies[-1])
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        Scale.copies.clear()
        assert kept() is None, "freed after the step"


class DataWriter(torch.optim.Optimizer):
    """An optimizer whose changes PyTorch does not count."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_optimizer_that_writes_through_data_is_not_missed(weight, set_to_none):
    optimizer = DataWriter([weight])
    for _ in range(3):
        micro_batches(weight, 2)
        assert torch.equal(Scale.copies[-1], weight.to(BF16))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def test_between_steps_nothing_is_reused(weight):
    micro_batches(weight, 2)
    weight.grad = None
    weight.data.mul_(3)  # an average of the weights is swapped in for an evaluation
    assert torch.equal(cast_weight(weight, BF16), weight.to(BF16))


def test_an_evaluation_within_a_step_keeps_and_reuses_nothing(weight):
    micro_batches(weight, 2)
    trained = Scale.copies[-1]
    weight.data.mul_(3)  # an average of the weights is swapped in
    with torch.no_grad():
        assert torch.equal(cast_weight(weight, BF16), weight.to(BF16))
    weight.data.div_(3)
    assert cast_weight(weight, BF16) is trained


def test_a_counted_change_within_a_step_is_seen(weight):
    micro_batches(weight, 2)
    with torch.no_grad():
        weight.mul_(3)
    assert torch.equal(cast_weight(weight, BF16), weight.to(BF16))


def test_without_accumulation_nothing_is_kept(weight):
    assert micro_batches(weight, 1) == 1
    copy = weakref.ref(Scale.copies.pop())
    assert copy() is None
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    copy = weakref.ref(cast_weight(frozen, BF16))
    assert copy() is None


def test_recomputation_in_the_backward_uses_the_copy_of_the_forward(weight):
    micro_batches(weight, 2)
    torch.optim.SGD([weight], lr=0.5).step()
    weight.grad = None
    Scale.copies.clear()
    x = torch.ones(2, requires_grad=True)
    checkpoint(lambda x: scale(x, weight).sin(), x, use_reentrant=False).sum().backward()
    assert len(Scale.copies) == 2 and Scale.copies[0] is Scale.copies[1]


def test_copies_die_with_their_weights():
    weight = nn.Parameter(torch.ones(2))
    micro_batches(weight, 2)
    copy = weakref.ref(Scale.copies[-1])
    Scale.copies.clear()
    del weight
    gc.collect()
    assert copy() is None
