"""Corners of the fused operations, in a process whose kernels are interpreted."""

from __future__ import annotations

import torch
from nopad.trainer.joint_products import joint_products
from nopad.trainer.triton_gate import gated_mlp
from nopad.trainer.triton_norm import rms_norm
from nopad.trainer.triton_rotary import rotary
from torch import nn

torch.manual_seed(0)
X, GAIN = torch.randn(1, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
WEIGHTS = [torch.randn(s, requires_grad=True) for s in ((12, 8), (12, 8), (8, 12))]
LAYERS = [nn.Linear(8, width) for width in (8, 4, 4)]
Q, K = (torch.randn(1, heads, 5, 4, requires_grad=True) for heads in (4, 2))
ANGLES = torch.randn(1, 5, 2).repeat(1, 1, 2)

OPERATIONS = {
    "norm": (lambda: rms_norm(X, GAIN, 1e-6), (X, GAIN)),
    "mlp": (lambda: gated_mlp(X, *WEIGHTS), (X, *WEIGHTS)),
    "rotary": (lambda: rotary(Q, K, ANGLES.cos(), ANGLES.sin())[0], (Q,)),
    "products": (lambda: joint_products(X, LAYERS)[0], (X, LAYERS[0].weight)),
}


def a_second_derivative_is_refused() -> None:
    for name, (operation, given) in OPERATIONS.items():
        try:
            torch.autograd.grad(operation().sin().sum(), given, create_graph=True)
        except RuntimeError as error:
            assert "second derivatives" in str(error), name
        else:
            raise AssertionError(f"{name}: its second derivative would be wrong")


if __name__ == "__main__":
    a_second_derivative_is_refused()
    print("finished")
