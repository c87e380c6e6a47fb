"""The fused AdamW update against `torch.optim.AdamW` after clipping."""

from __future__ import annotations

import pytest
import torch
from nopad.trainer.fused import ClippedAdamW
from nopad.trainer.fused import adamw as optimizer
from torch.testing import assert_close

OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}


@pytest.fixture
def kernel_on_cpu(interpreted, monkeypatch):
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    monkeypatch.setattr(optimizer, "_can_fuse", lambda param: True)


@pytest.fixture
def params():
    """Ours and torch's."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((70, 80), (3,), (0,))]
    return ours, [torch.nn.Parameter(p.detach().clone()) for p in ours]


def set_gradients(ours, gold, scale=1.0):
    for p, q in zip(ours, gold, strict=True):
        p.grad = torch.randn_like(p) * scale
        q.grad = p.grad.clone()


def test_an_update_is_that_of_torch_after_clipping(kernel_on_cpu, params):
    ours, gold = params
    a, b = ClippedAdamW(ours, max_norm=1.0, **OPTIONS), torch.optim.AdamW(gold, **OPTIONS)
    for step in range(4):
        set_gradients(ours, gold, 1e-4 if step == 2 else 1.0)  # clipped, and not
        before = [p.grad.clone() for p in ours]
        a.step()
        norm = torch.nn.utils.clip_grad_norm_(gold, 1.0)
        b.step()
        assert torch.equal(a.norm, norm)
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, before, strict=True)), "only read"
    for p, q in zip(ours, gold, strict=True):
        assert_close(p, q, rtol=1e-6, atol=1e-6)
        assert a.state[p].keys() == b.state[q].keys()
        for name in a.state[p]:
            assert_close(a.state[p][name], b.state[q][name], rtol=1e-6, atol=1e-7)


def test_a_norm_that_is_nan_makes_every_weight_nan(kernel_on_cpu, params):
    ours, gold = params
    a, b = ClippedAdamW(ours, max_norm=1.0, **OPTIONS), torch.optim.AdamW(gold, **OPTIONS)
    set_gradients(ours, gold)
    ours[1].grad[0] = gold[1].grad[0] = float("nan")
    a.step()
    torch.nn.utils.clip_grad_norm_(gold, 1.0)
    b.step()
    for p, q in zip(ours, gold, strict=True):
        assert p.isnan().all() and q.isnan().all()


@pytest.mark.gpu
def test_a_step_on_the_gpu_is_that_of_torch_after_clipping():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(s, device="cuda")) for s in ((1000, 30), (77,))]
    gold = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    a, b = ClippedAdamW(ours, lr=0.01), torch.optim.AdamW(gold, lr=0.01, fused=True)
    for _ in range(3):
        set_gradients(ours, gold)
        a.step()
        torch.nn.utils.clip_grad_norm_(gold, 1.0)
        b.step()
    for p, q in zip(ours, gold, strict=True):
        assert_close(p, q, rtol=1e-6, atol=1e-6)
