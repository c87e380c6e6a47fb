"""Speed of attention beside flash-attn called directly and the limits of the GPU.

    python benchmarks/bench_attention.py [--record FILE] [--quick]

Three parts, all in bf16 with 32 query heads and 8 KV heads:
    training   forward and backward of a pack of 16k and 64k tokens with natural document lengths
    decode     one query per sequence over pages, batch 1 to 512, context 128 to 32k; then with
               natural lengths, a few of them long
    mixed      decodes and chunks of prefill in one call
Paged calls are timed inside a CUDA graph, as the engine runs them; training calls are eager. The
limits (copy bandwidth, matrix rate) are measured first. The results of paged calls are compared
with the peer's. Prints tables, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from nopad.attention import PagedCache, Pages, Varlen, attend
from record import header, write_record

HEADS, KV_HEADS, DTYPE = 32, 8, torch.bfloat16
REPEATS = 7


def timed(call, inner: int = 1, repeats: int = REPEATS) -> float:
    """Return the median seconds of a call, measured with CUDA events."""
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


def timed_in_graph(calls) -> float:
    """Return the median seconds per call, with all calls replayed in one CUDA graph."""
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


def measure_limits() -> dict[str, float]:
    """Measure the copy bandwidth (bytes read and written) and the matrix rate."""
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
    """Draw document lengths of a corpus: log-normal, median 400, cut to fill the pack."""
    generator = torch.Generator().manual_seed(tokens)
    lengths = []
    while sum(lengths) < tokens:
        length = torch.empty(1).log_normal_(mean=6.0, std=1.2, generator=generator)
        lengths.append(max(1, min(int(length), tokens - sum(lengths))))
    return lengths


def causal_flops(lengths: list[int], head_dim: int, backward: bool) -> float:
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    return pairs * HEADS * head_dim * 4 * (3.5 if backward else 1)


def bench_training(tokens: int, head_dim: int) -> dict:
    """Time forward and backward of a pack: ours, flash-attn called directly, SDPA with a mask.

    The overhead is that of `attend` with flash-attn's kernels over calling them directly. The
    backend that `attend` selects by default may be faster, and is timed as well.
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

    def attend_default():
        return attend(q, k, v, varlen)

    def attend_flash():
        return attend(q, k, v, varlen, backend="flash2")

    def flash_direct():
        bounds = (cu_seqlens, cu_seqlens, longest, longest)
        return flash_attn_varlen_func(q, k, v, *bounds, causal=True)

    def with_backward(forward):
        return lambda: torch.autograd.grad(forward(), (q, k, v), grad)

    # Alternating, so that a drifting clock affects all of them.
    calls = [with_backward(forward) for forward in (flash_direct, attend_flash, attend_default)]
    rounds = [[timed(call, repeats=9) for call in calls] for _ in range(5)]
    direct, flash, default = (statistics.median(times) for times in zip(*rounds, strict=True))
    flops = causal_flops(lengths, head_dim, backward=True)
    row = {
        "tokens": tokens,
        "sequences": len(lengths),
        "longest": longest,
        "head_dim": head_dim,
        "attend_ms": flash * 1e3,
        "flash_direct_ms": direct * 1e3,
        "overhead_percent": (flash / direct - 1) * 100,
        "attend_TFLOP_s": flops / flash / 1e12,
        "attend_chosen_ms": default * 1e3,
    }
    if tokens <= 16384:
        row["sdpa_block_mask_ms"] = time_block_mask(q, k, v, grad, lengths) * 1e3
    return row


def time_block_mask(q, k, v, grad, lengths: list[int]) -> float:
    """Time SDPA over the full pack with a block-diagonal mask."""
    document_ids = torch.arange(len(lengths), device="cuda").repeat_interleave(
        torch.tensor(lengths, device="cuda")
    )
    mask = (document_ids[:, None] == document_ids).tril_()[None, None]
    group = HEADS // KV_HEADS

    def step():
        heads = [q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)]
        rows = (x.transpose(0, 1)[None] for x in heads)
        out = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask)
        return torch.autograd.grad(out[0].transpose(0, 1), (q, k, v), grad)

    return timed(step, repeats=3)


def paged_step(queries: list[int], lengths: list[int], head_dim: int, page_size: int, copies: int):
    """Build the inputs of a paged call.

    copies: layers of the cache, one per timed call, so that no call finds its keys in the L2 cache.
    """
    torch.manual_seed(0)  # the same keys for every backend
    num_pages = [-(-n // page_size) for n in lengths]
    generator = torch.Generator().manual_seed(0)
    page_ids = torch.randperm(sum(num_pages), generator=generator).int().split(num_pages)
    table = torch.nn.utils.rnn.pad_sequence(list(page_ids), batch_first=True).cuda()
    shapes = [(KV_HEADS, head_dim, head_dim)] * copies
    cache = PagedCache(sum(num_pages), page_size, shapes, DTYPE, "cuda")
    for layer in range(copies):
        for tensor in cache.layer(layer):
            tensor.normal_()
    tokens = sum(queries)
    q = torch.randn(tokens, HEADS, head_dim, device="cuda", dtype=DTYPE)
    cu_seqlens = torch.tensor([0, *queries], device="cuda").cumsum(0).int()
    kv_slots = torch.full((tokens,), -1, device="cuda")
    kv_lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    pages = Pages(cache, table, kv_lengths, kv_slots, max(lengths))
    return q, Varlen(cu_seqlens, max(queries), pages)


def paged_times(
    queries: list[int], lengths: list[int], head_dim: int, cache_bytes: float = 2e9
) -> dict[str, float]:
    """Return the seconds of a paged call by backend and page size; compare the outputs."""
    from nopad.attention.backends import BACKEND_MODULES, ScoreParams

    size = sum(lengths) * KV_HEADS * head_dim * 4
    copies = max(1, min(8, int(cache_bytes // max(size, 1))))
    times, results = {}, {}
    for backend, page_size in (("triton", 16), ("triton", 256), ("flash2", 256)):
        q, varlen = paged_step(queries, lengths, head_dim, page_size, copies)
        scores, module = ScoreParams(head_dim**-0.5), BACKEND_MODULES[backend]
        _ = attend_once(q, varlen, backend)

        def call(layer, q=q, varlen=varlen, scores=scores, module=module):
            return module.paged(q, *varlen.pages.cache.layer(layer), varlen, scores)

        times[f"{backend}_page{page_size}"] = timed_in_graph(
            [lambda layer=layer, call=call: call(layer) for layer in range(copies)]
        )
        results[backend, page_size] = call(0).float()
    difference = (results["triton", 256] - results["flash2", 256]).abs().max().item()
    assert difference < 0.05, f"Triton and flash-attn differ by {difference}"
    return times


def attend_once(q, varlen: Varlen, backend: str):
    """Call `attend` once: it makes the backend's trial call and loads its library."""
    dims = (q.shape[0], KV_HEADS, q.shape[2])
    k, v = (torch.zeros(dims, device="cuda", dtype=DTYPE) for _ in range(2))
    return attend(q, k, v, varlen, backend=backend)


def bench_decode(batch: int, context: int, head_dim: int, bandwidth: float) -> dict:
    """Time a decode step of sequences of one length."""
    row = {"batch": batch, "context": context, "head_dim": head_dim}
    return row | decode_times([context] * batch, head_dim, bandwidth)


def bench_decode_uneven(batch: int, head_dim: int, bandwidth: float) -> dict:
    """Time a decode step of sequences of natural lengths: log-normal, median 650."""
    generator = torch.Generator().manual_seed(batch)
    samples = torch.empty(batch).log_normal_(mean=6.5, std=1.0, generator=generator)
    lengths = [max(1, min(int(n), 32768)) for n in samples]
    row = {"batch": batch, "keys": sum(lengths), "longest": max(lengths), "head_dim": head_dim}
    return row | decode_times(lengths, head_dim, bandwidth)


def decode_times(lengths: list[int], head_dim: int, bandwidth: float) -> dict:
    """Time a decode step, in microseconds and in percent of the copy bandwidth, its limit."""
    times = paged_times([1] * len(lengths), lengths, head_dim)
    moved = sum(lengths) * KV_HEADS * head_dim * 4 + len(lengths) * HEADS * head_dim * 4
    row = {}
    for name, seconds in times.items():
        row[f"{name}_us"] = seconds * 1e6
        row[f"{name}_bandwidth_percent"] = moved / seconds / 1e12 / bandwidth * 100
    return row


def bench_mixed(batch: int, context: int, chunk: int, head_dim: int) -> dict:
    """Time decodes with two prefill chunks in one call: a first and a second one."""
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
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    parser.add_argument("--quick", action="store_true", help="measure fewer points")
    args = parser.parse_args()
    limits = measure_limits()
    show("limits", [limits])
    train = [bench_training(t, d) for d in (64, 128) for t in (16384, 65536)]
    show("training, forward and backward", train)
    decodes = [bench_decode(*point, limits["copy_TB_s"]) for point in decode_grid(args.quick)]
    show("decode", decodes)
    sizes = [(b, d) for d in (64, 128) for b in (8, 64, 256)]
    natural = [bench_decode_uneven(*size, limits["copy_TB_s"]) for size in sizes]
    show("decode, natural lengths", natural)
    mixes = [bench_mixed(b, 1024, 1024, d) for d in (64, 128) for b in (0, 64, 256)]
    show("mixed", mixes)
    record = {
        **header("attention"),
        "ceilings": limits,
        "training": train,
        "decode": decodes,
        "decode_uneven": natural,
        "mixed": mixes,
    }
    write_record(record, args.record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
