"""Sinks by the log-sum-exp, over kernels that know nothing of them."""

import torch
from nopad.attention import Varlen
from nopad.attention.backends import sinks
from nopad.attention.backends.call_spec import ScoreParams
from nopad.attention.backends.forward_backward import attend_by_backward
from nopad.attention.reference import reference

LENGTHS, HEADS, DIM = [5, 1, 7], 4, 8


class PlainKernels:
    """Attention as flash-attn computes it: the backward takes P from lse, Σ P dP from out."""

    @staticmethod
    def _scores(q, k, varlen, scale):
        document = torch.repeat_interleave(torch.arange(3), varlen.cu_seqlens.diff())
        seen = (document[:, None] == document) & torch.ones(len(q), len(q)).tril().bool()
        return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)

    @classmethod
    def forward(cls, q, k, v, varlen, score_params):
        s = cls._scores(q, k, varlen, score_params.scale)
        out = torch.einsum("hqk,khd->qhd", s.softmax(-1), v)
        return sinks.add_sinks(out, s.logsumexp(-1), score_params.sinks)

    @classmethod
    def backward(cls, grad, q, k, v, out, lse, varlen, score_params):
        p = (cls._scores(q, k, varlen, score_params.scale) - lse[..., None]).exp()
        dp = torch.einsum("qhd,khd->hqk", grad, v)
        ds = p * (dp - (grad * out).sum(-1).t()[..., None]) * score_params.scale
        return (
            torch.einsum("hqk,khd->qhd", ds, k),
            torch.einsum("hqk,qhd->khd", ds, q),
            torch.einsum("hqk,qhd->khd", p, grad),
            sinks.sinks_gradient(grad, out, lse, score_params.sinks),
        )


def test_output_and_gradients_are_those_of_a_softmax_with_sinks():
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), HEADS, DIM, requires_grad=True) for _ in range(3))
    logits = torch.tensor([-3.0, 0.0, 0.5, 30.0], requires_grad=True)
    cu_seqlens = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    varlen, params = Varlen(cu_seqlens, 7), ScoreParams(0.3, sinks=logits)
    out = attend_by_backward(PlainKernels, q, k, v, varlen, params)
    expected = reference(q, k, v, varlen, scale=0.3, sinks=logits)
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v, logits), cotangent),
        torch.autograd.grad(expected, (q, k, v, logits), cotangent),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
