"""Linear cross-entropy by chunks: the loss and gradients of PyTorch's, without all logits."""

from __future__ import annotations

import pytest
import torch
from nopad.trainer.loss import cross_entropy, linear_cross_entropy


@pytest.fixture
def chunks_of_four_rows(monkeypatch):
    monkeypatch.setattr("nopad.trainer.loss.cross_entropy.CHUNK_BYTES_CPU", 4 * 37 * 4)


def counting(share: float, rows: int = 11) -> torch.Tensor:
    """Targets of which this share are labels below 37; the others are -100."""
    targets = torch.randint(0, 37, (rows,))
    idle = torch.randperm(rows)[: rows - round(share * rows)]
    return targets.index_fill(0, idle, -100)


def stock_loss(hidden, weight, shift, targets, weights, smoothing, z_loss):
    """The same by PyTorch, from all logits: the weighted sum, and each loss."""
    logits = torch.nn.functional.linear(hidden, weight, shift)
    losses = torch.nn.functional.cross_entropy(
        logits, targets, reduction="none", label_smoothing=smoothing
    )
    losses = losses + z_loss * torch.logsumexp(logits, -1).square() * (targets != -100)
    return (losses * weights).sum(), losses


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padding", [0, 27])
@pytest.mark.parametrize(
    ("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.1, 0.01)]
)
def test_chunks_give_the_loss_and_gradients_of_the_whole(
    chunks_of_four_rows, monkeypatch, smoothing, z_loss, padding, bias, share
):
    def padded(weight, dtype):  # as on a GPU
        return torch.nn.functional.pad(weight.to(dtype), (0, 0, 0, padding))

    monkeypatch.setattr(cross_entropy, "_aligned", padded)
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 8, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(37, dtype=torch.float64, requires_grad=True) if bias else None
    targets, weights = counting(share), torch.rand(11)
    inputs = [x for x in (hidden, weight, shift) if x is not None]
    whole, losses = stock_loss(hidden, weight, shift, targets, weights, smoothing, z_loss)
    gold = torch.autograd.grad(3 * whole, inputs)
    total, each = linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=shift,
        token_weights=weights,
        label_smoothing=smoothing,
        z_loss=z_loss,
    )
    ours = torch.autograd.grad(3 * total, inputs)
    assert torch.allclose(total, whole)
    assert torch.allclose(each, losses)
    for a, b in zip(ours, gold, strict=True):
        assert torch.allclose(a.double(), b, atol=2e-5)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(chunks_of_four_rows, frozen):
    torch.manual_seed(0)
    inputs = [torch.randn(s, requires_grad=True) for s in ((11, 8), (37, 8), (37,))]
    targets = counting(0.4)

    def loss() -> torch.Tensor:
        hidden, weight, bias = inputs
        return linear_cross_entropy(hidden, weight, targets, bias=bias)[0]

    gold = torch.autograd.grad(loss(), inputs)
    for index in frozen:
        inputs[index].requires_grad_(False)
    loss().backward()
    for index, (tensor, gradient) in enumerate(zip(inputs, gold, strict=True)):
        ours = tensor.grad
        assert ours is None if index in frozen else torch.equal(ours, gradient)


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_as_near_as_that_of_low_logits(
    chunks_of_four_rows, dtype, autocast, share
):
    torch.manual_seed(0)
    hidden, weight, shift = torch.randn(64, 32), torch.randn(37, 32), torch.randn(37)
    targets, divisor = counting(share, 64), 3 * 64

    def gradients(loss, input_dtype=torch.float32, cast=False):
        inputs = [x.to(input_dtype).requires_grad_() for x in (hidden, weight, shift)]
        with torch.autocast("cpu", dtype, enabled=cast):
            return torch.autograd.grad(loss(*inputs), inputs)

    def stock(hidden, weight, shift):
        logits = torch.nn.functional.linear(hidden, weight, shift).float()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / divisor

    def ours(hidden, weight, shift):
        return linear_cross_entropy(hidden, weight, targets, bias=shift, divisor=divisor)[0]

    low = (torch.float32 if autocast else dtype, autocast)
    gold = gradients(stock)
    for a, b, c in zip(gradients(ours, *low), gradients(stock, *low), gold, strict=True):
        assert a.dtype == b.dtype and (a - c).norm() <= 2 * (b - c).norm()


def test_rows_without_a_label_are_not_computed(monkeypatch):
    seen = []

    def kernel(logits, vocab_size, targets, *rest):
        seen.append(len(targets))
        return cross_entropy._losses_and_gradient(logits, vocab_size, targets, *rest)

    monkeypatch.setattr(cross_entropy, "_kernel", lambda device: kernel)
    hidden, weight = torch.randn(100, 8), torch.randn(37, 8)
    for counted, computed in ((40, 40), (96, 96), (97, 100), (0, 0)):
        for num_labels in (None, counted):
            linear_cross_entropy(
                hidden, weight, counting(counted / 100, 100), num_labels=num_labels
            )
            assert sum(seen) == computed
            seen.clear()


def test_the_op_breaks_no_graph():
    weight = torch.randn(37, 8, requires_grad=True)
    targets = torch.randint(0, 37, (11,))
    hidden = torch.randn(11, 8, requires_grad=True)

    def loss(hidden):
        return linear_cross_entropy(2 * hidden, weight, targets)[0]

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(hidden), hidden)
    (gold,) = torch.autograd.grad(loss(hidden), hidden)
    assert torch.equal(ours, gold)
