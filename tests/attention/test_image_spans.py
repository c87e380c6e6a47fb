"""Tokens of one image see each other in both directions, those of its neighbours do not."""

from __future__ import annotations

import pytest
import torch
from nopad.attention import Varlen, attend
from nopad.attention.image_spans import attend_image_spans, find_spans
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

BOUNDS = [0, 9, 9, 21, 30]
JOINED = torch.zeros(30, dtype=torch.bool)
JOINED[[2, 3, 4, 7, 8, 9, 10, 14, 15, 16, 18, 29]] = True  # images: 2-5, 7-8, 9-11, 14-17, 18-19
SPANS = [(0, 2, 6), (0, 7, 9), (9, 9, 12), (9, 14, 18), (9, 18, 20)]
PARAMS = {"scale": 0.3, "window": None, "softcap": None, "sinks": None}


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (30, 4, 8), (30, 2, 8), (30, 2, 8)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def packed(q: Tensor, k: Tensor, v: Tensor, joined: Tensor, **params) -> Tensor:
    varlen, params = Varlen(torch.tensor(BOUNDS, dtype=torch.int32), 12), PARAMS | params
    out = attend(q, k, v, varlen, **params)
    return attend_image_spans(out, q, k, v, varlen, joined[None, :, None], params)


def by_mask(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Every pair of tokens, with the rule of Transformers' masks."""
    token = torch.arange(30)
    image, document = torch.full((30,), -1), torch.zeros(30, dtype=torch.int64)
    for number, (_, first, end) in enumerate(SPANS):
        image[first:end] = number
    for start in BOUNDS[1:]:
        document[start:] += 1
    sees = (token[:, None] >= token) | ((image[:, None] == image) & (image >= 0))
    sees &= document[:, None] == document
    if window is not None:
        sees &= token[:, None] - token < window
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * PARAMS["scale"]
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def difference(ours, window: int | None) -> float:
    """The largest of outputs and gradients."""
    inputs = tensors()
    results = []
    for run in (lambda *x: ours(*x, JOINED, window=window), lambda *x: by_mask(*x, window)):
        out = run(*inputs)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        results.append([out, *torch.autograd.grad(out, inputs, cotangent)])
    return max(float((a - b).detach().abs().max()) for a, b in zip(*results, strict=True))


def test_spans_end_with_their_documents():
    assert find_spans(torch.tensor(BOUNDS), JOINED, None) == SPANS
    none_first = torch.tensor([0, 0, 3, 3]), torch.tensor([1, 1, 0]).bool()
    assert find_spans(*none_first, None) == [(0, 0, 3)]
    near = [(max(begin, first - 5), first, end) for begin, first, end in SPANS]
    assert find_spans(torch.tensor(BOUNDS), JOINED, 6) == near


@pytest.mark.parametrize("window", [None, 4, 6])
def test_outputs_and_gradients_are_those_of_every_pair_of_tokens(window):
    assert difference(packed, window) < 1e-5


def test_layers_recomputed_in_the_backward_pass_have_the_same_gradients():
    def again(*tensors, **params):
        return checkpoint(packed, *tensors, use_reentrant=False, **params)

    assert difference(again, 6) < 1e-5


def test_one_graph_serves_rows_of_all_images():
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(packed, backend=count, fullgraph=True)
    assert difference(compiled, 6) < 1e-5
    no_images = torch.zeros_like(JOINED)
    q, k, v = tensors()
    torch.testing.assert_close(compiled(q, k, v, no_images, window=6), attend(
        q, k, v, Varlen(torch.tensor(BOUNDS, dtype=torch.int32), 12), **PARAMS | {"window": 6}
    ))  # fmt: skip
    assert count.frame_count == 1


def test_spans_are_found_once_for_layers_that_share_a_mask(monkeypatch):
    from nopad.attention import image_spans

    calls = []
    found = image_spans.find_spans
    monkeypatch.setattr(image_spans, "find_spans", lambda *a: calls.append(a) or found(*a))
    (q, k, v), joined = tensors(), JOINED[None, :, None]
    varlen = Varlen(torch.tensor(BOUNDS, dtype=torch.int32), 12)
    total = 0.0
    for window in (None, 6, None, 6):
        params = PARAMS | {"window": window}
        out = attend_image_spans(attend(q, k, v, varlen, **params), q, k, v, varlen, joined, params)
        total = total + out.sum()
    total.backward()
    assert len(calls) == 2


def test_a_row_without_images_is_left_alone():
    """Models may ask for spans of text, too: what images cannot have is no obstacle."""
    (q, k, v), none = tensors(), torch.zeros(1, 30, 1, dtype=torch.bool)
    varlen = Varlen(torch.tensor(BOUNDS, dtype=torch.int32), 12)
    out = attend(q, k, v, varlen)
    assert attend_image_spans(out, q, k, v, varlen, none, PARAMS | {"softcap": 3.0}) is out


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"window": 3}, "image of 4 tokens is longer than the sliding window of 3"),
        ({"softcap": 30.0}, "not supported with soft-capped scores"),
        ({"sinks": torch.zeros(4)}, "not supported with attention sinks"),
    ],
)
def test_what_cannot_be_computed_is_refused(params, told):
    with pytest.raises(ValueError, match=told):
        packed(*tensors(), JOINED, **params)
