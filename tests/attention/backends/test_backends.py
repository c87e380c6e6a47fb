"""Every backend that runs here against the oracle, on random mixes of lengths.

The bound is that of flash-attention's own tests: an error at most twice that of the reference
computed in the backend's precision, both held against the reference in a higher one.
"""

from dataclasses import dataclass

import pytest
import torch
from nopad.attention import PagedCache, Pages, Varlen, attend
from nopad.attention.backends import selection
from nopad.attention.reference import reference

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GPU = pytest.mark.gpu


@dataclass
class Case:
    """Sequences as (keys cached before, queries of this step), and how scores are made."""

    name: str
    sequences: list
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    shared_pages: int = 0

    def __str__(self):
        return self.name


DECODES = [(0, 1), (15, 1), (16, 1), (17, 1), (99, 1), (130, 1)]
MIXED = [(0, 5), (31, 1), (0, 1), (16, 16), (15, 2), (0, 0), (7, 33), (130, 1), (64, 0)]
FAMILY = [(640, 1), (640, 30), (700, 1), (655, 5), (641, 1)]
PAGED = [
    Case("decodes at page edges", DECODES),
    Case("prefill, chunks and decodes mixed with empty slots", MIXED),
    Case("a window shorter than a block", MIXED, window=7),
    Case("a window longer than a page", MIXED, window=40),
    Case("a softcap", MIXED, softcap=3.0),
    Case("sinks", MIXED, sinks=True),
    Case("sinks, window and softcap together", MIXED, window=20, softcap=2.0, sinks=True),
    Case("a scale of its own", MIXED, scale=0.3),
    Case("values narrower than keys", MIXED, key_dim=96, value_dim=64),
    Case("pages of 48", MIXED, page_size=48),
    Case("pages of 256", MIXED, page_size=256),
    Case(
        "one head per key head, head dim 32", MIXED, heads=3, kv_heads=3, key_dim=32, value_dim=32
    ),
    Case("groups of six, head dim 80", MIXED, heads=6, kv_heads=1, key_dim=80, value_dim=80),
    Case("head dim 128", MIXED, key_dim=128, value_dim=128),
    Case("head dim 256", MIXED, key_dim=256, value_dim=256),
    Case("a shared prefix", [(64, 1), (64, 3), (70, 1), (64, 1)], shared_pages=4),
    Case("a long shared prefix", FAMILY, shared_pages=40),
    Case("a long shared prefix and a scale", FAMILY, shared_pages=40, scale=0.3),
    Case("a long shared prefix and a softcap", FAMILY, shared_pages=40, softcap=3.0),
    Case("a long context over few sequences", [(1500, 1), (3, 1)]),
]
LONGER = {
    "a window longer than a page",
    "a softcap",
    "sinks",
    "a scale of its own",
    "pages of 256",
    "head dim 128",
    "head dim 256",
    "a long shared prefix and a scale",
    "a long shared prefix and a softcap",
}
PACKED = [
    Case("one sequence", [(0, 50)]),
    Case("lengths of one and empty slots", [(0, 1), (0, 17), (0, 0), (0, 1), (0, 64), (0, 0)]),
    Case("a window", [(0, 40), (0, 3)], window=7),
    Case("a softcap", [(0, 40), (0, 3)], softcap=3.0),
    Case("sinks", [(0, 40), (0, 3)], sinks=True),
    Case("values narrower than keys", [(0, 40), (0, 3)], key_dim=96, value_dim=64),
    Case("one head per key head", [(0, 40), (0, 3)], heads=2, key_dim=128, value_dim=128),
]


def inputs(case, dtype, seed=0):
    """q, k, v and, where anything is cached before, a cache filled with what came before."""
    make = torch.Generator().manual_seed(seed)
    tokens = sum(queries for _, queries in case.sequences)

    def draw(*shape):
        return torch.randn(*shape, generator=make).to(DEVICE, dtype)

    q = draw(tokens, case.heads, case.key_dim)
    k = draw(tokens, case.kv_heads, case.key_dim)
    v = draw(tokens, case.kv_heads, case.value_dim)
    sinks = draw(case.heads) if case.sinks else None
    return q, k, v, sinks


def varlen_of(case, dtype, seed=0):
    counts = torch.tensor([0] + [queries for _, queries in case.sequences])
    cu_seqlens = counts.cumsum(0).to(DEVICE, torch.int32)
    return Varlen(cu_seqlens, int(counts.max()))


def paged_varlen(case, dtype, seed=0):
    """Pages dealt out at random, the first shared where the case says so; the rest poisoned."""
    make = torch.Generator().manual_seed(seed + 1)
    size = case.page_size
    totals = [before + queries for before, queries in case.sequences]
    need = [-(-total // size) for total in totals]
    deck = torch.randperm(sum(need) + 3, generator=make).tolist()
    shared = deck[: case.shared_pages]
    del deck[: case.shared_pages]
    tables = []
    for count in need:
        own = [deck.pop() for _ in range(max(0, count - len(shared)))]
        tables.append((shared + own)[:count] if shared else own)
    width = max(need)
    table = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)
    shape = (case.kv_heads, case.key_dim, case.value_dim)
    cache = PagedCache(sum(need) + 3 + case.shared_pages, size, [shape, shape], dtype, DEVICE)
    for tensor in cache.layer(1):
        tensor.fill_(torch.nan)
    filled = {(page, i) for page in shared for i in range(size)}
    slots = []
    for (before, queries), pages in zip(case.sequences, tables, strict=True):
        filled |= {(pages[i // size], i % size) for i in range(before)}
        places = range(before, before + queries)
        slots += [pages[i // size] * size + i % size for i in places]
    where = torch.tensor(sorted(page * size + i for page, i in filled), dtype=torch.int64)
    for tensor in cache.layer(1):
        rows = torch.randn(len(where), *tensor.shape[2:], generator=make)
        tensor.view(-1, *tensor.shape[2:])[where.to(DEVICE)] = rows.to(DEVICE, dtype)
    counts = torch.tensor([0] + [queries for _, queries in case.sequences])
    pages = Pages(
        cache,
        table.to(DEVICE),
        torch.tensor(totals, dtype=torch.int32, device=DEVICE),
        torch.tensor(slots, dtype=torch.int64, device=DEVICE),
        max(totals) + 5,
    )
    return Varlen(counts.cumsum(0).to(DEVICE, torch.int32), int(counts.max()), pages)


def rule_of(case, sinks):
    rule = {"scale": case.scale, "window": case.window, "softcap": case.softcap, "sinks": sinks}
    return rule


def refused(backend, case, dtype, page_size, grad):
    spec = selection.CallSpec(
        DEVICE, dtype, case.heads, case.kv_heads, case.key_dim, case.value_dim, grad,
        case.window is not None, case.softcap is not None, case.sinks, page_size, False,
    )  # fmt: skip
    return selection.backend_reason(backend, spec)


def assert_close_to_oracle(got, low, high):
    """At most twice the error of the low-precision reference, and a few roundings."""
    roundings = 8 * torch.finfo(torch.float32).eps * high.abs().max().item()
    allowed = 2 * (low.double() - high).abs().max().item() + roundings
    assert torch.isfinite(got).all()
    assert (got.double() - high).abs().max().item() <= allowed


def check_paged(backend, case, dtype):
    q, k, v, sinks = inputs(case, dtype)
    varlen = paged_varlen(case, dtype)
    rule = rule_of(case, sinks)
    got = attend(q, k, v, varlen, layer=1, backend=backend, **rule)
    wide = {**rule, "sinks": None if sinks is None else sinks.double()}
    high = reference(q.double(), k.double(), v.double(), varlen, layer=1, **wide)
    assert_close_to_oracle(got, reference(q, k, v, varlen, layer=1, **rule), high)


def check_packed(backend, case, dtype):
    q, k, v, sinks = inputs(case, dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)] + ([] if sinks is None else [sinks])
    if sinks is not None:
        sinks.requires_grad_()
    rule, varlen = rule_of(case, sinks), varlen_of(case, dtype)
    make = torch.Generator().manual_seed(7)
    weight = torch.randn(q.shape[0], q.shape[1], v.shape[2], generator=make).to(q)

    def run(function, dtype, **named):
        made = [x.detach().to(dtype).requires_grad_() for x in leaves]
        own = {**rule, "sinks": made[3] if len(made) > 3 else None}
        out = function(*made[:3], varlen, **own, **named)
        return [out, *torch.autograd.grad((out * weight.to(dtype)).sum(), made)]

    got = run(attend, dtype, backend=backend)
    low, high = run(reference, dtype), run(reference, torch.float64)
    for a, b, c in zip(got, low, high, strict=True):
        assert_close_to_oracle(a.detach(), b.detach(), c.detach())


def marks(backend: str, case: Case):
    """Interpreted kernels take a second a case, and these cases are parts of others."""
    return [pytest.mark.slow] if backend == "triton" and not CUDA and case.name in LONGER else []


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(backend, case, id=f"{backend}-{case}", marks=marks(backend, case))
        for backend in ("sdpa", "triton")
        for case in PAGED
    ],
)
def test_paged_backends_agree_with_the_oracle_in_fp32(backend, case):
    check_paged(backend, case, torch.float32)


@pytest.mark.parametrize(
    "case", [PAGED[1], PAGED[6], pytest.param(PAGED[-4], marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_paged_backends_agree_with_the_oracle_in_fp16(backend, case):
    check_paged(backend, case, torch.float16)


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_sdpa_agrees_with_the_oracle_on_packed_rows_and_their_gradients(case):
    check_packed("sdpa", case, torch.float32)


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", PAGED, ids=str)
@pytest.mark.parametrize("backend", ["flash2", "triton", "sdpa"])
def test_paged_backends_agree_with_the_oracle_on_the_gpu(backend, case, dtype):
    reason = refused(backend, case, dtype, case.page_size, False)
    if reason is None:
        check_paged(backend, case, dtype)
    else:
        assert backend == "flash2", reason
        with pytest.raises(ValueError, match="does not support"):
            check_paged(backend, case, dtype)


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", PACKED, ids=str)
@pytest.mark.parametrize("backend", ["cudnn", "flash2", "torch", "triton_packed", "sdpa"])
def test_packed_backends_agree_with_the_oracle_on_the_gpu(backend, case, dtype):
    reason = refused(backend, case, dtype, 0, True)
    if reason is None:
        check_packed(backend, case, dtype)
    else:
        assert backend != "sdpa", reason
        with pytest.raises(ValueError, match="does not support"):
            check_packed(backend, case, dtype)
