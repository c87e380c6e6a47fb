"""(p) A prompt joins 128 requests that decode: how long its step takes, and when its token comes.

step        from the tokens of the step before to those of the step with the prompt
reference   the matrix products and the attention of such a step alone, replayed in one graph
TTFT        from the submission of the prompt to its first token
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from nopad.attention import PagedCache, Pages, Varlen, attend_cached
from nopad.inference import Engine, SamplingParams

from .report import add_row

RUNNING = 128
PROMPTS = (256, 2048)
REPEATS = 9
PAGE_SIZE = 256


def run_mixed_steps(name: str, model) -> None:
    """Time steps of the engine, and the reference with as many keys."""
    rng = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    # By default such a step has at most 2,048 tokens: the longer prompt would run in two.
    engine = Engine(model, memory=40 << 30, max_num_batched_tokens=4096)
    lengths = rng.integers(300, 900, RUNNING)
    for length in lengths:
        params = SamplingParams(temperature=0, max_tokens=2000)
        engine.add_request(rng.integers(0, vocabulary, length).tolist(), params)
    steps = 0
    for num_tokens in PROMPTS:
        times = []
        for _ in range(REPEATS + 3):  # the first ones capture the graph
            prompt = rng.integers(0, vocabulary, num_tokens).tolist()
            times.append(_join(engine, prompt))
            steps += 12
        step = statistics.median(step for step, _ in times[3:])
        ttft = statistics.median(first for _, first in times[3:])
        reference = _reference_seconds(model, [*(lengths + steps), num_tokens], num_tokens)
        add_row(
            name, f"nopad, {num_tokens} prompt tokens and {RUNNING} decodes", step,
            RUNNING + 1, ttft_p50=ttft, step_seconds=step, reference_seconds=reference,
            times_reference=step / reference,
        )  # fmt: skip
    engine.release()


def _join(engine: Engine, prompt: list[int]) -> tuple[float, float]:
    """Return the seconds of the step that a prompt is in, and those until its token."""
    for _ in range(10):
        engine.step()
    params = SamplingParams(temperature=0, max_tokens=1)
    longest, last = 0.0, time.perf_counter()
    start = last
    request_id = engine.add_request(prompt, params)
    while True:
        events = engine.step()
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        if any(event.request_id == request_id for event in events):
            return longest, now - start


@torch.no_grad()
def _reference_seconds(model, lengths: list[int], num_tokens: int) -> float:
    """Time the products and the attention of a step whose last sequence is a prompt."""
    config, layers = model.config, model.model.layers
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shapes = [(kv_heads, dim, dim)] * len(layers)
    width = -(-max(lengths) // PAGE_SIZE)
    count, total = len(lengths), RUNNING + num_tokens
    cache = PagedCache(count * width, PAGE_SIZE, shapes, model.dtype, model.device)

    def on_device(values, dtype=torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=model.device)

    table = on_device(np.arange(count * width)).view(count, width)
    no_slots = on_device(np.full(total, -1), torch.int64)
    pages = Pages(cache, table, on_device(lengths), no_slots, max(lengths))
    all_tokens = Varlen(on_device([*range(count), total]), num_tokens, pages)
    last_tokens = Varlen(on_device(range(count + 1)), 1, pages)
    x = torch.randn(total, config.hidden_size, dtype=model.dtype, device=model.device)
    q = torch.randn(total, heads, dim, dtype=model.dtype, device=model.device)
    qkv = [
        torch.cat([getattr(layer.self_attn, f"{p}_proj").weight for p in "qkv"]) for layer in layers
    ]

    def products_and_attention() -> None:
        for index, (layer, weight) in enumerate(zip(layers, qkv, strict=True)):
            is_last = layer is layers[-1]  # of the last layer only `count` tokens are computed
            rows, varlen = (count, last_tokens) if is_last else (total, all_tokens)
            F.linear(x, weight)
            out = attend_cached(q[:rows], varlen, layer=index, scale=dim**-0.5).flatten(1)
            layer.self_attn.o_proj(out)
            gate = layer.mlp.gate_proj(x[:rows])
            layer.mlp.up_proj(x[:rows])
            layer.mlp.down_proj(gate)
        model.lm_head(x[:count])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        products_and_attention()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products_and_attention()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
