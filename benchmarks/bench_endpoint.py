"""Concurrent HTTP clients beside one batch of the same prompts, on one engine.

    python benchmarks/bench_endpoint.py                          # a small model on a CPU
    python benchmarks/bench_endpoint.py path/to/model --tokens 128

Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

import torch
from nopad.inference import Engine, SamplingParams
from nopad.inference.endpoint import serve


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="checkpoint; default: a small random Llama")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    engine = Engine(args.model) if args.model else small_engine()
    prompts = [[40 + k, *range(3, 40)] for k in range(args.clients)]
    with serve(engine, port=0, max_requests=max(64, args.clients)) as server:
        times = {"one batch": [], "clients": []}
        for _ in range(args.repeats + 1):  # the first of each warms up
            times["one batch"].append(timed(lambda: one_batch(engine, prompts, args.tokens)))
            times["clients"].append(timed(lambda: clients(server, prompts, args.tokens)))
    medians = {name: round(statistics.median(values[1:]), 3) for name, values in times.items()}
    for name, seconds in medians.items():
        print(f"{name:10} {seconds:7.3f} s   of {[round(each, 3) for each in times[name][1:]]}")
    ratio = medians["clients"] / medians["one batch"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    settings = {"settings": vars(args), "device": device}
    print(json.dumps({**settings, "seconds": medians, "ratio": round(ratio, 3)}))


def small_engine() -> Engine:
    """An engine on a random Llama of 20 M parameters, with a tokenizer of letters."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = {chr(32 + number): number for number in range(95)} | {"</s>": 95, "<u>": 96}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<u>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
    config = LlamaConfig(vocab_size=97, num_attention_heads=8, **shape)
    return Engine(LlamaForCausalLM(config), tokenizer)


def timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_batch(engine: Engine, prompts: list[list[int]], tokens: int) -> None:
    engine.reset_prefix_cache()
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))


def clients(server: Any, prompts: list[list[int]], tokens: int) -> None:
    """Send every prompt over a connection of its own, all at once."""
    server._engine.reset_prefix_cache()

    def ask(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {server.token}"}
        request = Request(f"{server.url}/completions", json.dumps(body).encode(), headers)
        with urlopen(request) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == tokens

    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(ask, prompts))


if __name__ == "__main__":
    main()
