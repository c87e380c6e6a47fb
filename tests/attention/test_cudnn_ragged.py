"""cuDNN's ragged attention: what is handed to its operations, held against the oracle on a CPU.

The operations themselves run on a GPU only (test_backends.py); here stand-ins of the same
signature compute from what they are given, and refuse what cuDNN would.
"""

import pytest
import torch
import torch._dynamo.testing
from nopad.attention import Varlen
from nopad.attention.backends import cudnn_ragged
from nopad.attention.backends.ask import Scores
from nopad.attention.reference import reference

SEEN = []


def sequences(bounds):
    return [slice(*ends) for ends in torch.stack([bounds[:-1], bounds[1:]], 1).tolist()]


def scores_of(q, k, scale):
    """Scaled products [H, Q, K] of one sequence, the future hidden."""
    hidden = torch.ones(len(q), len(q)).triu(1).bool()
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -torch.inf)


def forward(q, k, v, scale, *, is_causal, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv):
    """Attention and its log-sum-exp, sequence by sequence."""
    assert is_causal and cu_seqlens_q is cu_seqlens_kv and max_seqlen_q == max_seqlen_kv
    SEEN.append((len(cu_seqlens_q) - 1, max_seqlen_q))
    out, sums = torch.zeros(q.shape), torch.zeros(len(q), q.shape[1], 1)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for s in sequences(cu_seqlens_q):
        scores = scores_of(q[s], k[s], scale)
        sums[s, :, 0] = scores.logsumexp(-1).T
        out[s] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[s])
    return out, sums


def backward(grad, q, k, v, out, sums, scale, *, is_deterministic, **rule):
    """Gradients from the log-sum-exp at the place where cuDNN looks for it."""
    bounds, groups = rule["cu_seqlens_q"], q.shape[1] // k.shape[1]
    assert sums.shape == (len(bounds) - 1, q.shape[1], rule["max_seqlen_q"], 1)
    wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
    dq, dk, dv = (torch.zeros(q.shape) for _ in range(3))
    for i, s in enumerate(sequences(bounds)):
        weights = (scores_of(q[s], wide_k[s], scale) - sums[i, :, : s.stop - s.start]).exp()
        dv[s] = torch.einsum("hqk,qhd->khd", weights, grad[s])
        inner = torch.einsum("qhd,khd->hqk", grad[s], wide_v[s])
        inner = weights * (inner - (grad[s] * out[s]).sum(-1).T[:, :, None]) * scale
        dq[s] = torch.einsum("hqk,khd->qhd", inner, wide_k[s])
        dk[s] = torch.einsum("hqk,qhd->khd", inner, q[s])
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


@pytest.fixture(autouse=True)
def _operations(monkeypatch):
    class Operations:
        sdpa_fwd = staticmethod(forward)
        sdpa_bwd = staticmethod(backward)

    SEEN.clear()
    monkeypatch.setattr(torch.ops, "cudnn", Operations, raising=False)


def row(lengths):
    make = torch.Generator().manual_seed(len(lengths))
    shapes = [(sum(lengths), 4, 8), (sum(lengths), 2, 8), (sum(lengths), 2, 8)]
    q, k, v = (torch.randn(s, generator=make).requires_grad_() for s in shapes)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return q, k, v, Varlen(bounds, max(lengths))


def test_rows_of_other_counts_and_lengths_share_a_plan_and_agree_with_the_oracle():
    for lengths in ([5, 1, 9], [1], [2, 0, 3, 0], [600, 7], [4] * 17):
        q, k, v, varlen = row(lengths)
        weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
        got, want = (
            [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]
            for out in (
                cudnn_ragged.packed(q, k, v, varlen, Scores(0.3)),
                reference(q, k, v, varlen, scale=0.3),
            )
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    assert set(SEEN) == {(16, 512), (16, 1024), (32, 512)}


def test_a_longer_longest_length_compiles_no_second_graph():
    torch._dynamo.reset()
    seen = torch._dynamo.testing.CompileCounter()
    function = torch.compile(
        lambda q, k, v, varlen: cudnn_ragged.packed(q, k, v, varlen, Scores(0.3)).sum(),
        backend=seen, fullgraph=True, dynamic=True,
    )  # fmt: skip
    for lengths in ([5, 3], [2, 6], [1, 7]):
        q, k, v, varlen = row(lengths)
        function(q, k, v, varlen).backward()
        assert q.grad is not None and q.grad.abs().sum() > 0
    assert seen.frame_count == 1
