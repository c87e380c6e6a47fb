"""How fast attention is, beside flash-attn called directly and beside the machine's own ceilings.

    python benchmarks/bench_attention.py [--record FILE] [--quick]

Three parts, all bf16, 32 query heads over 8 key heads:
    training   forward and backward of a packed row of 16k and 64k tokens in natural lengths
    decode     one query per sequence over pages, batch 1 to 512, context 128 to 32k; then with
               natural lengths, of which a few are long
    mixed      decodes and a chunk of prefill in one call
Paged calls are timed inside a CUDA graph, as the engine runs them; training calls eagerly. The
ceilings (copy bandwidth, matrix product) are measured first. Every timed result is checked against
the peer's. Prints tables, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from nopad.attention import PagedCache, Pages, Varlen, attend
from record import head, write

HEADS, KV_HEADS, DTYPE = 32, 8, torch.bfloat16
REPEATS = 7


def timed(call, inner: int = 1, repeats: int = REPEATS) -> float:
    """Median seconds of a call, by device events."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / inner)
    return statistics.median(times)


def graphed(calls) -> float:
    """Median seconds per call of several, replayed in one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return timed(graph.replay, inner=len(calls))


def ceilings() -> dict[str, float]:
    """Copy bandwidth (bytes read and written) and matrix rate of this machine."""
    source = torch.randn(1 << 30, device="cuda", dtype=DTYPE)
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPE) for _ in range(2))
    product = timed(lambda: a @ b)
    return {
        "copy_TB_s": 2 * source.nbytes / copy / 1e12,
        "matmul_TFLOP_s": 2 * 8192**3 / product / 1e12,
    }


def natural_lengths(tokens: int) -> list[int]:
    """Document lengths as corpora have them: log-normal, median 400, cut to fill the row."""
    make = torch.Generator().manual_seed(tokens)
    lengths = []
    while sum(lengths) < tokens:
        drawn = torch.empty(1).log_normal_(mean=6.0, std=1.2, generator=make)
        lengths.append(max(1, min(int(drawn), tokens - sum(lengths))))
    return lengths


def causal_flops(lengths: list[int], head_dim: int, backward: bool) -> float:
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    return pairs * HEADS * head_dim * 4 * (3.5 if backward else 1)


def training(tokens: int, head_dim: int) -> dict:
    """Forward and backward of one packed row: ours, flash-attn direct, SDPA with a block mask.

    The overhead is that of `attend` over the very kernels it calls, flash-attn's; what it chooses
    by itself may be faster, and is timed beside.
    """
    from flash_attn import flash_attn_varlen_func

    lengths = natural_lengths(tokens)
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    varlen = Varlen(cu_seqlens, max(lengths))
    q = torch.randn(tokens, HEADS, head_dim, device="cuda", dtype=DTYPE, requires_grad=True)
    k, v = (
        torch.randn(tokens, KV_HEADS, head_dim, device="cuda", dtype=DTYPE, requires_grad=True)
        for _ in range(2)
    )
    grad = torch.randn_like(q)
    longest = max(lengths)

    def chosen():
        return attend(q, k, v, varlen)

    def ours():
        return attend(q, k, v, varlen, backend="flash2")

    def direct():
        ends = (cu_seqlens, cu_seqlens, longest, longest)
        return flash_attn_varlen_func(q, k, v, *ends, causal=True)

    def stepped(forward):
        return lambda: torch.autograd.grad(forward(), (q, k, v), grad)

    # in turns, so that a drifting clock meets both alike
    ways = [stepped(way) for way in (direct, ours, chosen)]
    rounds = [[timed(way, repeats=9) for way in ways] for _ in range(5)]
    theirs, mine, best = (statistics.median(times) for times in zip(*rounds, strict=True))
    flops = causal_flops(lengths, head_dim, backward=True)
    row = {
        "tokens": tokens,
        "sequences": len(lengths),
        "longest": longest,
        "head_dim": head_dim,
        "attend_ms": mine * 1e3,
        "flash_direct_ms": theirs * 1e3,
        "overhead_percent": (mine / theirs - 1) * 100,
        "attend_TFLOP_s": flops / mine / 1e12,
        "attend_chosen_ms": best * 1e3,
    }
    if tokens <= 16384:
        row["sdpa_block_mask_ms"] = block_mask(q, k, v, grad, lengths) * 1e3
    return row


def block_mask(q, k, v, grad, lengths: list[int]) -> float:
    """SDPA over the whole row with a block-diagonal mask."""
    documents = torch.arange(len(lengths), device="cuda").repeat_interleave(
        torch.tensor(lengths, device="cuda")
    )
    mask = (documents[:, None] == documents).tril_()[None, None]
    group = HEADS // KV_HEADS

    def step():
        heads = [q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)]
        rows = (x.transpose(0, 1)[None] for x in heads)
        out = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask)
        return torch.autograd.grad(out[0].transpose(0, 1), (q, k, v), grad)

    return timed(step, repeats=3)


def paged_step(queries: list[int], lengths: list[int], head_dim: int, page_size: int, copies: int):
    """Inputs of one paged call, and copies of its cache so that no call finds its keys in L2."""
    torch.manual_seed(0)  # the same keys for every backend
    need = [-(-n // page_size) for n in lengths]
    make = torch.Generator().manual_seed(0)
    deck = torch.randperm(sum(need), generator=make).int().split(need)
    table = torch.nn.utils.rnn.pad_sequence(list(deck), batch_first=True).cuda()
    shape = [(KV_HEADS, head_dim, head_dim)] * copies
    cache = PagedCache(sum(need), page_size, shape, DTYPE, "cuda")
    for layer in range(copies):
        for tensor in cache.layer(layer):
            tensor.normal_()
    tokens = sum(queries)
    q = torch.randn(tokens, HEADS, head_dim, device="cuda", dtype=DTYPE)
    cu_seqlens = torch.tensor([0, *queries], device="cuda").cumsum(0).int()
    slots = torch.full((tokens,), -1, device="cuda")
    ends = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    pages = Pages(cache, table, ends, slots, max(lengths))
    return q, Varlen(cu_seqlens, max(queries), pages)


def paged_times(
    queries: list[int], lengths: list[int], head_dim: int, budget: float = 2e9
) -> dict[str, float]:
    """Seconds of one paged call by backend and page size; all results are compared."""
    from nopad.attention.backends import MODULES, ScoreParams

    size = sum(lengths) * KV_HEADS * head_dim * 4
    copies = max(1, min(8, int(budget // max(size, 1))))
    times, results = {}, {}
    for backend, page_size in (("triton", 16), ("triton", 256), ("flash2", 256)):
        q, varlen = paged_step(queries, lengths, head_dim, page_size, copies)
        scores, module = ScoreParams(head_dim**-0.5), MODULES[backend]
        _ = attend_once(q, varlen, backend)

        def call(layer, q=q, varlen=varlen, scores=scores, module=module):
            return module.paged(q, *varlen.pages.cache.layer(layer), varlen, scores)

        times[f"{backend}_page{page_size}"] = graphed(
            [lambda layer=layer, call=call: call(layer) for layer in range(copies)]
        )
        results[backend, page_size] = call(0).float()
    wrong = (results["triton", 256] - results["flash2", 256]).abs().max().item()
    assert wrong < 0.05, f"Triton and flash-attn differ by {wrong}"
    return times


def attend_once(q, varlen: Varlen, backend: str):
    """One call through the front door, which makes the trial call and loads the library."""
    dims = (q.shape[0], KV_HEADS, q.shape[2])
    k, v = (torch.zeros(dims, device="cuda", dtype=DTYPE) for _ in range(2))
    return attend(q, k, v, varlen, backend=backend)


def decode(batch: int, context: int, head_dim: int, ceiling: float) -> dict:
    """A decode step of sequences of one length."""
    row = {"batch": batch, "context": context, "head_dim": head_dim}
    return row | decode_times([context] * batch, head_dim, ceiling)


def decode_uneven(batch: int, head_dim: int, ceiling: float) -> dict:
    """A decode step of sequences as long as people make them: log-normal, median 650."""
    make = torch.Generator().manual_seed(batch)
    drawn = torch.empty(batch).log_normal_(mean=6.5, std=1.0, generator=make)
    lengths = [max(1, min(int(n), 32768)) for n in drawn]
    row = {"batch": batch, "keys": sum(lengths), "longest": max(lengths), "head_dim": head_dim}
    return row | decode_times(lengths, head_dim, ceiling)


def decode_times(lengths: list[int], head_dim: int, ceiling: float) -> dict:
    """Memory-bound, so as share of the copy bandwidth."""
    times = paged_times([1] * len(lengths), lengths, head_dim)
    moved = sum(lengths) * KV_HEADS * head_dim * 4 + len(lengths) * HEADS * head_dim * 4
    row = {}
    for name, seconds in times.items():
        row[f"{name}_us"] = seconds * 1e6
        row[f"{name}_bandwidth_percent"] = moved / seconds / 1e12 / ceiling * 100
    return row


def mixed(batch: int, context: int, chunk: int, head_dim: int) -> dict:
    """Decodes beside two prefills of `chunk` tokens, one fresh and one continuing."""
    queries = [1] * batch + [chunk, chunk]
    lengths = [context] * batch + [chunk, 2 * chunk]
    times = paged_times(queries, lengths, head_dim)
    pairs = batch * context + chunk * (chunk + 1) // 2 + chunk * chunk + chunk * (chunk + 1) // 2
    row: dict = {"decodes": batch, "context": context, "chunk": chunk, "head_dim": head_dim}
    for name, seconds in times.items():
        row[f"{name}_us"] = seconds * 1e6
        row[f"{name}_TFLOP_s"] = pairs * HEADS * head_dim * 4 / seconds / 1e12
    return row


def show(title: str, rows: list[dict]) -> None:
    print(f"\n{title}", file=sys.stderr)
    columns = list({key: None for row in rows for key in row})
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(c), *(len(r[i]) for r in cells)) for i, c in enumerate(columns)]
    for line in [columns, *cells]:
        print("  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)), file=sys.stderr)


def _cell(value) -> str:
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def decode_grid(quick: bool):
    for head_dim in (64, 128):
        for batch in (1, 8, 64, 256, 512) if not quick else (1, 64, 256):
            for context in (128, 1024, 4096, 32768) if not quick else (1024, 4096):
                if batch * context * KV_HEADS * head_dim * 4 <= 18e9:
                    yield batch, context, head_dim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="also write the JSON here")
    parser.add_argument("--quick", action="store_true", help="a few points only")
    options = parser.parse_args()
    limits = ceilings()
    show("ceilings", [limits])
    train = [training(t, d) for d in (64, 128) for t in (16384, 65536)]
    show("training, forward and backward", train)
    decodes = [decode(*point, limits["copy_TB_s"]) for point in decode_grid(options.quick)]
    show("decode", decodes)
    sizes = [(b, d) for d in (64, 128) for b in (8, 64, 256)]
    natural = [decode_uneven(*size, limits["copy_TB_s"]) for size in sizes]
    show("decode, natural lengths", natural)
    mixes = [mixed(b, 1024, 1024, d) for d in (64, 128) for b in (0, 64, 256)]
    show("mixed", mixes)
    record = {
        **head("attention"),
        "ceilings": limits,
        "training": train,
        "decode": decodes,
        "decode_uneven": natural,
        "mixed": mixes,
    }
    write(record, options.record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
