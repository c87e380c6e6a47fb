"""The operators of attention in graphs of torch.compile."""

from __future__ import annotations

import torch
from nopad.attention import custom_ops
from nopad.attention.backends import sdpa


def test_gradients_have_the_strides_that_a_graph_assumes(monkeypatch):
    """Heads of latent attention come transposed, and torch's kernels keep such strides."""
    q, k, v = (torch.randn(4, 9, 8).transpose(0, 1) for _ in range(3))
    stock = sdpa.backward

    def with_strides_of_inputs(*args):
        return [torch.empty_like(x).copy_(g) for x, g in zip((q, k, v), stock(*args), strict=False)]

    bounds = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor(5)
    params = 0.3, None, None, True
    out, lse, backend = custom_ops.packed(q, k, v, None, *bounds, *params, True)
    monkeypatch.setattr(sdpa, "backward", with_strides_of_inputs)
    tensors = torch.randn(9, 4, 8), q, k, v, out, lse, None, *bounds, backend
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(custom_ops.packed_backward, (*tensors, *params), test_utils=tests)
