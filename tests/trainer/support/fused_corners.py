"""Corners of the fused operations, in a process whose kernels are interpreted."""

from __future__ import annotations

import torch
from nopad.kernels import norm
from nopad.trainer.fused.gated_mlp import gated_mlp
from nopad.trainer.fused.linear_group import linear_group
from nopad.trainer.fused.projection import Projection, merge_adjacent
from nopad.trainer.fused.rms_norm import add_rms_norm, rms_norm
from nopad.trainer.fused.rotary import apply_rotary
from nopad.trainer.fused.saved_rows import NormedRows, find_source, note_source
from torch import Tensor, nn

torch.manual_seed(0)
X, GAIN = torch.randn(1, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
WEIGHTS = [torch.randn(s, requires_grad=True) for s in ((12, 8), (12, 8), (8, 12))]
MLP = [Projection(weight) for weight in WEIGHTS]
LINEARS = [nn.Linear(8, width) for width in (8, 4, 4)]
QKV = [Projection(linear.weight, linear.bias) for linear in LINEARS]
Q, K = (torch.randn(1, heads, 5, 4, requires_grad=True) for heads in (4, 2))
ANGLES = torch.randn(1, 5, 2).repeat(1, 1, 2)

OPERATIONS = {
    "norm": (lambda: rms_norm(X, GAIN, 1e-6), (X, GAIN)),
    "mlp": (lambda: gated_mlp(X, MLP, torch.float32), (X, *WEIGHTS)),
    "rotary": (lambda: apply_rotary(Q, K, ANGLES.cos(), ANGLES.sin())[0], (Q,)),
    "qkv": (lambda: linear_group(X, QKV, torch.float32)[0], (X, LINEARS[0].weight)),
}


def a_second_derivative_is_refused() -> None:
    for name, (operation, inputs) in OPERATIONS.items():
        try:
            torch.autograd.grad(operation().sin().sum(), inputs, create_graph=True)
        except RuntimeError as error:
            assert "second derivatives" in str(error), name
        else:
            raise AssertionError(f"{name}: its second derivative would be wrong")


def results_can_be_changed_in_place() -> None:
    for operation, inputs in OPERATIONS.values():
        gold = torch.autograd.grad((operation() * 3).sin().sum(), inputs)
        ours = torch.autograd.grad(operation().mul_(3).sin_().sum(), inputs)
        torch.testing.assert_close(ours, gold)


def the_gradients_of_queries_and_keys_reach_one_product() -> None:
    """As in a model: between the rotated heads and the products nothing is copied."""
    grads: list[Tensor] = []
    q, k, _ = linear_group(X, QKV, torch.float32)
    for product in (q, k):
        product.register_hook(grads.append)
    heads = (x.view(1, 5, -1, 4).transpose(1, 2) for x in (q, k))
    a, b = apply_rotary(*heads, ANGLES.cos(), ANGLES.sin())
    assert a.transpose(1, 2).is_contiguous() and a._base is not None
    (a.sin().sum() + b.sin().sum()).backward()
    d_q, d_k = sorted((d.view(5, -1) for d in grads), key=lambda d: d.storage_offset())
    assert len(merge_adjacent([d_q, d_k], [linear.weight for linear in LINEARS[:2]])) == 1


def a_backward_inside_autocast_computes_as_its_forward_did() -> None:
    for operation, inputs in OPERATIONS.values():
        gold, out = torch.autograd.grad(operation().sin().sum(), inputs), operation().sin().sum()
        with torch.autocast("cpu", torch.bfloat16):
            ours = torch.autograd.grad(out, inputs)
        torch.testing.assert_close(ours, gold, rtol=0, atol=0)


def normalized_rows_are_normalized_again_unless_they_were_changed() -> None:
    x, rows = add_rms_norm(X, None, GAIN, 1e-6)
    note_source(rows, NormedRows(x.detach(), GAIN.detach(), 1e-6, rows.dtype))
    assert torch.equal(find_source(rows, rows.dtype).rows(), rows.flatten(0, -2))
    assert find_source(rows, torch.bfloat16) is None and find_source(rows * 1, rows.dtype) is None
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = linear_group(rows, QKV, torch.float32)[0]
    assert not any(t.data_ptr() == rows.data_ptr() for t in kept), "the rows are not kept"
    (gold,) = torch.autograd.grad(LINEARS[0](rows * 1).sin().sum(), LINEARS[0].weight)
    (ours,) = torch.autograd.grad(out.sin().sum(), LINEARS[0].weight)
    torch.testing.assert_close(ours, gold)
    rows.detach().mul_(2)
    assert find_source(rows, rows.dtype) is None
    with torch.inference_mode():  # whose tensors have no versions
        x, rows = add_rms_norm(X.detach(), None, GAIN, 1e-6)
        note_source(rows, NormedRows(x, GAIN, 1e-6, rows.dtype))
        linear_group(rows, QKV, torch.float32)
        gated_mlp(rows, MLP, torch.float32)


def no_rows_have_a_backward() -> None:
    empty = torch.zeros(1, 0, 8, requires_grad=True)
    makers = (
        lambda: gated_mlp(empty, MLP, torch.float32),
        lambda: rms_norm(empty, GAIN, 1e-6),
        lambda: linear_group(empty, QKV, torch.float32)[0],
    )
    for make in makers:
        (gradient,) = torch.autograd.grad(make().sum(), empty)
        assert gradient.shape == empty.shape


def the_gradient_of_a_frozen_gain_is_not_summed() -> None:
    stock, norm._sum_kernel = norm._sum_kernel, None
    (gradient,) = torch.autograd.grad(rms_norm(X, GAIN.detach(), 1e-6).sin().sum(), X)
    norm._sum_kernel = stock
    (gold,) = torch.autograd.grad(rms_norm(X, GAIN, 1e-6).sin().sum(), X)
    assert torch.equal(gradient, gold)


def heads_may_lie_further_apart_than_32_bits_count() -> None:
    storage = torch.empty(2**31 + 4, dtype=torch.int8)  # of which little is touched
    q = storage.as_strided((1, 3, 1, 4), (0, 2**30, 4, 1)).copy_(torch.arange(12).view(1, 3, 1, 4))
    rotated, _ = apply_rotary(q, q, torch.ones(1, 1, 4), torch.zeros(1, 1, 4))
    assert torch.equal(rotated, q)


if __name__ == "__main__":
    a_second_derivative_is_refused()
    results_can_be_changed_in_place()
    the_gradients_of_queries_and_keys_reach_one_product()
    a_backward_inside_autocast_computes_as_its_forward_did()
    normalized_rows_are_normalized_again_unless_they_were_changed()
    no_rows_have_a_backward()
    the_gradient_of_a_frozen_gain_is_not_summed()
    heads_may_lie_further_apart_than_32_bits_count()
    print("finished")
