"""cuDNN's ragged attention: the arguments of its graphs, compared with the reference on a CPU.

The graphs themselves only run on a GPU (test_backends.py); the stand-ins here compute from their
arguments, and refuse what cuDNN would refuse.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
from nopad.attention import Varlen
from nopad.attention.backends import ScoreParams, cudnn_graph, cudnn_ragged
from nopad.attention.hf.interface import attention
from nopad.attention.reference import reference
from torch.utils.checkpoint import checkpoint

SEEN = []


class StandIn:
    """Computes from the arguments of a graph, read where cuDNN would read them."""

    def __init__(self, shape, run):
        self.shape, self._run = shape, run

    def run(self, tensors, offsets):
        shape, lengths = self.shape, offsets.lengths.flatten()
        SEEN.append((shape.sequences, shape.max_length))
        assert lengths.dtype == torch.int32 and len(lengths) == shape.sequences
        assert lengths.max() <= shape.max_length
        for name in "qkv":
            x, layout = tensors[name], getattr(shape, name)
            assert (*x.shape[1:], *x.stride()[:2]) == layout and x.stride(2) == 1
        assert all(tensors[name].is_contiguous() for name in tensors if name not in "qkv")
        slices = {name: self._slices(x, offsets) for name, x in tensors.items()}
        for n in range(shape.sequences):
            self._run(shape, {name: tensors[name][slices[name][n]] for name in tensors})

    def _slices(self, x, offsets):
        starts = offsets.offsets(x.stride(0)).flatten()
        assert starts.dtype == torch.int64 and len(starts) == self.shape.sequences + 1
        starts = starts[:-1] // x.stride(0)
        ends = starts + offsets.lengths.flatten()
        return [slice(*pair) for pair in zip(starts.tolist(), ends.tolist(), strict=True)]


def scores_of(q, k, scale):
    """Scaled products [H, Q, K] of one sequence, the future hidden."""
    hidden = torch.ones(len(q), len(q)).triu(1).bool()
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -torch.inf)


def wide(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def forward(shape, x):
    """Attention and its log-sum-exp, of one sequence."""
    scores = scores_of(x["q"], wide(x["k"], x["q"]), shape.scale)
    x["lse"][:, :, 0] = scores.logsumexp(-1).T
    x["out"][:] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide(x["v"], x["q"]))


def backward(shape, x):
    """Gradients from the log-sum-exp, of one sequence."""
    q, k, v, grad = x["q"], wide(x["k"], x["q"]), wide(x["v"], x["q"]), x["grad"]
    weights = (scores_of(q, k, shape.scale) - x["lse"][:, :, 0].T[:, :, None]).exp()
    inner = torch.einsum("qhd,khd->hqk", grad, v)
    inner = weights * (inner - (grad * x["out"]).sum(-1).T[:, :, None]) * shape.scale
    x["dq"][:] = torch.einsum("hqk,khd->qhd", inner, k)
    for name, gradient in (
        ("dk", torch.einsum("hqk,qhd->khd", inner, q)),
        ("dv", torch.einsum("hqk,qhd->khd", weights, grad)),
    ):
        x[name][:] = gradient.unflatten(1, (x[name].shape[1], -1)).sum(2)


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    SEEN.clear()
    monkeypatch.setattr(cudnn_graph, "forward_graph", lambda shape: StandIn(shape, forward))
    monkeypatch.setattr(cudnn_graph, "backward_graph", lambda shape: StandIn(shape, backward))


def row(lengths):
    make = torch.Generator().manual_seed(len(lengths))
    shapes = [(sum(lengths), 4, 8), (sum(lengths), 2, 8), (sum(lengths), 2, 8)]
    q, k, v = (torch.randn(s, generator=make).requires_grad_() for s in shapes)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return q, k, v, Varlen(bounds, max(lengths))


def test_rows_of_other_counts_and_lengths_share_a_plan():
    for lengths in ([5, 1, 9], [1], [2, 0, 3, 0], [600, 7], [4] * 17):
        q, k, v, varlen = row(lengths)
        weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
        got, want = (
            [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]
            for out in (
                cudnn_ragged.packed(q, k, v, varlen, ScoreParams(0.3)),
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
        lambda q, k, v, varlen: cudnn_ragged.packed(q, k, v, varlen, ScoreParams(0.3)).sum(),
        backend=seen, fullgraph=True, dynamic=True,
    )  # fmt: skip
    for lengths in ([5, 3], [2, 6], [1, 7]):
        q, k, v, varlen = row(lengths)
        function(q, k, v, varlen).backward()
        assert q.grad is not None and q.grad.abs().sum() > 0
    assert seen.frame_count == 1


def test_how_a_row_is_cut_is_worked_out_once_and_again_when_it_changes(monkeypatch):
    made, original = [], cudnn_graph.RaggedOffsets

    def counted(cu_seqlens, sequences):
        made.append(cu_seqlens.tolist())
        return original(cu_seqlens, sequences)

    monkeypatch.setattr(cudnn_ragged, "RaggedOffsets", counted)
    q, k, v, varlen = row([5, 3])
    layers = [cudnn_ragged.packed(q, k, v, varlen, ScoreParams(0.3)) for _ in range(3)]
    torch.stack(layers).sum().backward()
    assert made == [[0, 5, 8]]
    varlen.cu_seqlens[1] = 2  # in place, as a buffer that is filled again
    other = cudnn_ragged.packed(q, k, v, varlen, ScoreParams(0.3))
    torch.testing.assert_close(other, reference(q, k, v, varlen, scale=0.3))
    cudnn_ragged.packed(q, k, v, row([4, 4])[3], ScoreParams(0.3)).sum().backward()
    assert made == [[0, 5, 8], [0, 2, 8], [0, 4, 8]]
    with torch.inference_mode():  # a tensor without a version is never cached
        varlen = row([4, 4])[3]
        for _ in range(2):
            cudnn_ragged.packed(q, k, v, varlen, ScoreParams(0.3))
    assert made[3:] == [[0, 4, 8]] * 2


def test_a_buffer_filled_again_without_a_sign_is_seen_in_the_next_batch():
    q, k, v, varlen = row([5, 3])

    def layer(q):
        return cudnn_ragged.packed(q, k, v, varlen, ScoreParams(0.3))

    for cut in (2, 6, 4):
        varlen.cu_seqlens.data[1] = cut  # no new version, as a broadcast leaves none
        out = layer(checkpoint(layer, q, use_reentrant=False))
        gold = reference(reference(q, k, v, varlen, scale=0.3), k, v, varlen, scale=0.3)
        torch.testing.assert_close(out, gold)
        ours, theirs = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, gold))
        torch.testing.assert_close(ours, theirs)


def test_what_is_kept_of_a_row_ends_when_a_first_layer_attends():
    module, x = torch.nn.Module(), torch.randn(1, 2, 8, 4)
    bounds = torch.tensor([0, 5, 8], dtype=torch.int32)
    cached = cudnn_ragged._offsets(bounds)
    for layer_idx, stays in ((1, True), (0, False)):
        module.layer_idx = layer_idx
        attention(module, x, x, x, None, cu_seq_lens_q=bounds, max_length_q=5)
        assert (cudnn_ragged._offsets(bounds) is cached) == stays


def test_batches_in_turn_keep_their_own_offsets():
    """As with accumulation over several batches: one does not evict the other's."""
    first, second = (torch.tensor([0, cut, 8], dtype=torch.int32) for cut in (5, 3))
    cached = [cudnn_ragged._offsets(bounds) for bounds in (first, second)]
    assert [cudnn_ragged._offsets(bounds) for bounds in (first, second)] == cached


def test_rows_of_all_sizes_share_few_backward_plans():
    steps = {cudnn_ragged._round_up_tokens(tokens) for tokens in range(1, 100_000)}
    assert len(steps) < 25
    assert all(
        0 <= cudnn_ragged._round_up_tokens(n) - n < max(1024, n / 4) for n in range(1, 100_000, 7)
    )


def test_a_graph_is_run_on_the_device_of_its_tensors(monkeypatch):
    entered, graph = [], object.__new__(cudnn_graph.Graph)

    @contextmanager
    def device(which):
        entered.append(which)
        yield
        entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(cudnn_graph, "_handle", lambda device: None)
    ran = SimpleNamespace(execute=lambda *_, **__: entered.append("ran"))
    graph.shape, graph.tensor_names = SimpleNamespace(device="cpu"), []
    graph.workspace_bytes = 1
    graph.graph = ran
    graph.run({}, cudnn_ragged._offsets(torch.tensor([0, 3], dtype=torch.int32)))
    assert entered == ["cpu", "ran", None]


def test_heads_that_lie_apart_are_laid_side_by_side():
    q, k, v, varlen = row([5, 3])
    odd = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    got = cudnn_ragged.packed(odd, k, v, varlen, ScoreParams(0.3))
    torch.testing.assert_close(got, reference(q, k, v, varlen, scale=0.3))
