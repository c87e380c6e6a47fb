"""Concurrent HTTP clients beside one batch of the same prompts, on one engine.

    python benchmarks/bench_endpoint.py                          # a small model on a CPU
    python benchmarks/bench_endpoint.py path/to/model --tokens 128
    python benchmarks/bench_endpoint.py --training 300           # the share of time in a training

With --training, the model is trained for that many seconds, once without requests and once under
constant load; the share of time that requests take must not exceed --max-share.

Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from tempfile import mkdtemp
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from nopad import PackedDataset, PackedTrainer
from nopad.inference import Engine, SamplingParams
from nopad.inference.endpoint import serve
from nopad.trainer.with_hf import ServeCallback
from transformers import TrainerCallback, TrainingArguments


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="checkpoint; default: a small random Llama")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--training", type=float, metavar="SECONDS", help="train beside requests")
    parser.add_argument("--max-share", type=float, default=0.1)
    args = parser.parse_args()
    if args.training:
        return training_share(args)
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


def training_share(args: argparse.Namespace) -> None:
    """Measure the share of a training's time that requests take, and the steps that it loses."""
    alone = train(args, None)
    engine = Engine(args.model) if args.model else small_engine()
    limits = {"max_share": args.max_share, "timeout": 600.0, "max_requests": max(64, args.clients)}
    with serve(engine, port=0, when="step", **limits) as server:
        done = []
        for number in range(args.clients):
            Thread(target=ask_until_refused, args=(server, number, args, done), daemon=True).start()
        beside = train(args, server)
    share = beside["request_seconds"] / beside["seconds"]
    lost = 1 - beside["steps"] / beside["seconds"] / (alone["steps"] / alone["seconds"])
    print(f"alone      {alone['steps'] / alone['seconds']:7.2f} optimizer steps per second")
    print(f"beside     {beside['steps'] / beside['seconds']:7.2f}, {len(done)} requests answered")
    print(f"requests take {share:.2%} of the time, at most {args.max_share:.0%}; speed -{lost:.2%}")
    found = {"alone": alone, "beside": beside, "share": share, "lost": lost, "answers": len(done)}
    print(json.dumps({"settings": vars(args), **found}))


def train(args: argparse.Namespace, server: Any) -> dict[str, float]:
    """Train on random documents for some seconds; return figures of all steps but the first."""
    engine = server._engine if server else Engine(args.model) if args.model else small_engine()
    model, draw = engine._model, random.Random(0)
    model.set_attn_implementation("nopad")
    rows = [[draw.randrange(3, 90) for _ in range(draw.randrange(8, 250))] for _ in range(2000)]
    settings = TrainingArguments(
        mkdtemp(), max_steps=10**6, report_to="none", disable_tqdm=True, save_strategy="no",
        use_cpu=not torch.cuda.is_available(), logging_steps=10**6, bf16=torch.cuda.is_available(),
    )  # fmt: skip
    watch = StopWatch(args.training, server)
    data = PackedDataset(rows, budget=2048, epochs=None)
    trainer = PackedTrainer(model, settings, train_dataset=data, callbacks=[watch])
    if server is not None:
        trainer.add_callback(ServeCallback(trainer, server))
    trainer.train()
    return watch.figures


class StopWatch(TrainerCallback):
    """Ends the training after some seconds."""

    def __init__(self, seconds: float, server: Any):
        self.seconds, self.server = seconds, server
        self.start = self.request_seconds = 0.0
        self.figures: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the time; that of this step's requests is not in it yet."""
        requests = self.server._queue.time_share.seconds if self.server else 0.0
        if state.global_step == 1:
            self.start, self.request_seconds = time.perf_counter(), requests
        self.figures = {
            "steps": state.global_step - 1,
            "seconds": time.perf_counter() - self.start,
            "request_seconds": requests - self.request_seconds,
        }
        control.should_training_stop = self.figures["seconds"] > self.seconds


def ask_until_refused(server: Any, number: int, args: argparse.Namespace, done: list[int]) -> None:
    """Send one request after the other, until the server closes."""
    prompt = [40 + number % 50, *range(3, 40)]
    while True:
        try:
            ask(server, prompt, args.tokens)
            done.append(number)
        except HTTPError:  # refused for now
            time.sleep(0.1)
        except OSError:
            return


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
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: ask(server, prompt, tokens), prompts))


def ask(server: Any, prompt: list[int], tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {server.token}"}
    request = Request(f"{server.url}/completions", json.dumps(body).encode(), headers)
    with urlopen(request) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == tokens


if __name__ == "__main__":
    main()
