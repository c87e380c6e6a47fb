"""Losses of rows of logits and their gradient against PyTorch."""

from __future__ import annotations

import pytest
import torch
from nopad.packing import IGNORE_INDEX
from nopad.trainer.loss import linear_cross_entropy
from nopad.trainer.loss.attached_loss import count_labels
from torch.nn.functional import cross_entropy
from torch.testing import assert_close


@pytest.fixture
def full_precision():
    """Products in fp32, whatever a trainer tested before has asked for."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("vocab_size", [5, 64, 8200])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.02)])
def test_losses_and_gradient_are_those_of_pytorch(vocab_size, smoothing, z_loss):
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    from nopad.kernels import losses_and_gradient

    torch.manual_seed(0)
    logits, weights = 3 * torch.randn(4, vocab_size), torch.rand(4)
    targets = torch.randint(0, vocab_size, (4,))
    targets[1] = IGNORE_INDEX
    ours, gold = logits.clone(), logits.requires_grad_()
    losses = losses_and_gradient(
        ours, vocab_size, targets, weights, smoothing, z_loss, IGNORE_INDEX
    )
    padded = torch.nn.functional.pad(logits.detach(), (0, 11), value=torch.nan)
    beside = losses_and_gradient(
        padded, vocab_size, targets, weights, smoothing, z_loss, IGNORE_INDEX
    )
    assert torch.equal(beside, losses) and torch.equal(padded[:, :vocab_size], ours)
    assert not padded[:, vocab_size:].any()
    expected = cross_entropy(gold, targets, reduction="none", label_smoothing=smoothing)
    expected = expected + z_loss * gold.logsumexp(-1).square() * (targets != IGNORE_INDEX)
    (gradient,) = torch.autograd.grad((weights * expected).sum(), gold)
    assert_close(losses, expected.detach(), rtol=1e-6, atol=1e-6)
    assert_close(ours, gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_label_outside_the_vocabulary_gives_nan(smoothing):
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    from nopad.kernels import losses_and_gradient

    def by_kernel(logits, targets):
        rows, weights = logits.clone(), torch.ones(len(logits))
        losses = losses_and_gradient(rows, 7, targets, weights, smoothing, 0.0, IGNORE_INDEX)
        return losses, rows

    def by_pytorch(logits, targets):
        hidden, head = logits.clone().requires_grad_(), torch.eye(7)
        total, losses = linear_cross_entropy(hidden, head, targets, label_smoothing=smoothing)
        return losses, *torch.autograd.grad(total, hidden)

    torch.manual_seed(0)
    logits = torch.randn(6, 7)
    targets = torch.tensor([3, 7, 1 << 40, -1, -101, IGNORE_INDEX])
    for function in (by_kernel, by_pytorch):
        losses, gradient = function(logits, targets)
        assert losses.isnan().tolist() == [False, True, True, True, True, False]
        assert gradient.isnan().all(1).tolist() == losses.isnan().tolist()
        assert_close(losses[:1], function(logits[:1], targets[:1])[0])


@pytest.mark.usefixtures("interpreted")
def test_a_tensor_is_scaled_by_a_number_on_the_device():
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    from nopad.kernels import scale_tensor

    x, factor = torch.randn(70, 80), torch.tensor(1 / 3)
    assert_close(scale_tensor(x, factor, x.dtype), x / 3, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("full_precision")
@pytest.mark.gpu
def test_rows_that_count_are_picked_without_a_wait():
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64), torch.randn(500, 64)
    targets = torch.randint(0, 500, (300,)).where(torch.rand(300) < 0.4, -100)

    def gradients(hidden, weight, targets, told) -> tuple[torch.Tensor, ...]:
        count = count_labels(targets) if told else None
        inputs = hidden.requires_grad_(), weight.requires_grad_()
        num_labels = None if count is None else count.read()
        total, losses = linear_cross_entropy(*inputs, targets, num_labels=num_labels)
        return losses, *torch.autograd.grad(total, inputs)

    gold = gradients(hidden, weight, targets, True)
    inputs = [x.detach().cuda() for x in (hidden, weight, targets)]
    results = [gradients(*inputs, told=False)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        results.append(gradients(*inputs, told=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results.append(gradients(*inputs, told=True))
    graph.replay()
    for ours in results:
        for a, b in zip(ours, gold, strict=True):
            assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)
