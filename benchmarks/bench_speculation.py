"""Speculative decoding from earlier completions, beside the same engine without it.

    python benchmarks/bench_speculation.py                        # on a GPU, about 4 minutes
    python benchmarks/bench_speculation.py --model runs/pretrain/final --only updates
    python benchmarks/bench_speculation.py --tiny                 # on a CPU

updates: a real model (stories260k, or a checkpoint with a tokenizer) is evaluated again and again,
with a few optimizer steps on its own samples in between; drafts are the completions of the
evaluation before. In fp32, greedy and sampled, completions must be those without speculation; in
bf16 the fraction that differs is reported. forced: the shape of Llama-3.2-1B with random weights,
and drafts of its own completions with a part of their tokens replaced, so that a known part is
accepted; with none accepted, speculation must cost nothing. Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import torch
from generation.workloads import llama_1b, llama_cpu
from nopad.inference import Engine, SamplingParams
from record import header, shared_dir, timed, write_record
from transformers import AutoModelForCausalLM, AutoTokenizer

ACCEPTANCE = (0.0, 0.5, 0.7, 0.9)
RESULTS: list[dict[str, Any]] = []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=shared_dir() / "models" / "stories260k")
    parser.add_argument("--only", default="updates,forced", help="parts, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="few short requests, for a CPU")
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    args = parser.parse_args()
    if args.tiny:
        torch.set_num_threads(1)
    if "updates" in args.only:
        if args.model.is_dir():
            run_updates(args.model, args.tiny)
        else:
            print(f"updates: skipped, there is no model at {args.model}; pass --model")
    if "forced" in args.only:
        run_forced(args.tiny)
    record = {**header("speculation"), "results": RESULTS}
    write_record(record, args.record)
    print(json.dumps(record))


def add_row(**row: Any) -> None:
    RESULTS.append(row)
    print("  ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def stories_prompts(count: int) -> list[str]:
    """Return beginnings of children's stories, all different."""
    names, things = ("Lily", "Tom", "Ben", "Mia"), ("dog", "ball", "tree", "boat", "hat", "bird")
    starts = ("Once upon a time, {} had a {}.", "One day, {} saw a big {}.", "{} lost the {}.")
    texts = [start.format(*pair) for start in starts for pair in product(names, things)]
    return texts[:count]


def run_updates(folder: Path, tiny: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampling = {
        "greedy": SamplingParams(temperature=0, max_tokens=24 if tiny else 200),
        "sampled": SamplingParams(temperature=0.8, seed=1, max_tokens=24 if tiny else 200),
    }
    dtypes = (None,) if device == "cpu" else (None, torch.bfloat16)
    for dtype, source in product(dtypes, ("history", "ngram")):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.to(device)
        shared: dict[str, Any] = {"memory": 4 << 30} if device == "cuda" else {}
        plain = Engine(model, tokenizer, dtype=dtype, **shared)
        speculating = Engine(model, tokenizer, dtype=dtype, speculate=source, **shared)
        for batch, (name, params) in product((1, 4) if tiny else (1, 8, 64), sampling.items()):
            if source == "ngram" and name == "sampled":
                continue
            plain.max_num_seqs = speculating.max_num_seqs = batch
            prompts = stories_prompts(max(2 if tiny else 8, batch))
            row = repeat_evaluation(
                model, tokenizer, (plain, speculating), prompts, params, 1 if tiny else 5
            )
            add_row(part="updates", source=source, sampling=name, batch=batch,
                    dtype="bf16" if dtype else "fp32", **row)  # fmt: skip
        plain.release()
        speculating.release()


def repeat_evaluation(model, tokenizer, engines, prompts, params, count: int) -> dict[str, Any]:
    """Evaluate with both engines, train, and repeat; the first two evaluations warm up."""
    plain, speculating = engines
    want: Any
    got: Any
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    start = [p.detach().clone() for p in model.parameters()]
    times: list[tuple[float, float]] = []
    differing = tokens = 0
    for evaluation in range(count + 2):
        if evaluation == 2:
            speculating.stats.reset()
        seconds, want = timed(lambda: plain.generate(prompts, params))
        faster, got = timed(lambda: speculating.generate(prompts, params))
        if evaluation >= 2:
            times.append((seconds, faster))
            tokens = sum(len(c.token_ids) for c in got)
            differing += sum(a.token_ids != b.token_ids for a, b in zip(want, got, strict=True))
        train(model, tokenizer, plain, prompts[:8], optimizer)
    moved = sum(
        float((p.detach() - q).norm() ** 2) for p, q in zip(model.parameters(), start, strict=True)
    )
    norm = sum(float(q.norm() ** 2) for q in start)
    without, with_drafts = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "acceptance": speculating.stats.acceptance_rate,
        "drafted_per_token": speculating.stats.drafted_tokens / speculating.stats.new_tokens,
        "without_tokens_per_second": tokens / without,
        "tokens_per_second": tokens / with_drafts,
        "times": without / with_drafts,
        "differing": differing / (count * len(prompts)),
        "weights_moved": (moved / norm) ** 0.5,
    }


def train(model, tokenizer, engine, prompts, optimizer, steps: int = 4) -> None:
    """Train a few steps on sampled stories: weights move as little as in a late training phase."""
    sampled = engine.generate(prompts, SamplingParams(temperature=1.0, max_tokens=64))
    for _ in range(steps):
        loss = torch.zeros((), device=model.device)
        for completion in sampled:
            ids = [*completion.prompt_token_ids, *completion.token_ids]
            batch = torch.tensor([ids], device=model.device)
            loss = loss + model(input_ids=batch, labels=batch).loss / len(sampled)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def run_forced(tiny: bool) -> None:
    model: Any = sure_of_itself(llama_cpu() if tiny else llama_1b())
    memory: dict[str, Any] = {} if tiny else {"memory": 24 << 30}
    batches, new, repeats = ((1, 4), 32, 1) if tiny else ((1, 8, 64, 256), 200, 3)
    plain, speculating = Engine(model, **memory), Engine(model, speculate="history", **memory)
    params = SamplingParams(temperature=0, max_tokens=new)
    rng = random.Random(0)
    vocab_size = model.config.vocab_size
    for batch in batches:
        prompts = [
            [rng.randrange(1, vocab_size) for _ in range(rng.randrange(150, 250))]
            for _ in range(batch)
        ]
        want = plain.generate(prompts, params)
        without = statistics.median(time_fresh(plain, prompts, params)[0] for _ in range(repeats))
        for acceptance in ACCEPTANCE:
            times, differing = [], 0
            for repeat in range(repeats + 2):
                force_drafts(speculating, acceptance, rng, vocab_size)
                if repeat == 2:
                    speculating.stats.reset()
                seconds, got = time_fresh(speculating, prompts, params)
                if repeat >= 2:
                    times.append(seconds)
                    differing += sum(
                        a.token_ids != b.token_ids for a, b in zip(want, got, strict=True)
                    )
            stats = speculating.stats
            add_row(
                part="forced", forced=acceptance, batch=batch, acceptance=stats.acceptance_rate,
                drafted_per_token=stats.drafted_tokens / stats.new_tokens,
                without_tokens_per_second=batch * new / without,
                tokens_per_second=batch * new / statistics.median(times),
                times=without / statistics.median(times), spread=max(times) - min(times),
                steps=stats.steps / repeats, graph_steps=stats.graph_steps / repeats,
                differing=differing / (repeats * batch),
            )  # fmt: skip


def time_fresh(engine: Engine, prompts, params) -> tuple[float, Any]:
    """Return the seconds of a call without cached prefixes, and its completions."""
    engine.reset_prefix_cache()
    return timed(lambda: engine.generate(prompts, params))


def sure_of_itself(model: Any) -> Any:
    """Make the next token depend on the newest alone, with a margin far above rounding.

    Random weights choose between near ties: completions would differ by rounding, and the part of
    the drafts that is accepted would not be the forced one. The cost of a step is unchanged.
    """
    vocab_size = model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding.mul_(100)
        successors = torch.randperm(vocab_size - 1, generator=generator).to(embedding.device) + 1
        head = embedding.clone() / 100
        head[successors] = embedding[1:] / 100
        head[0] = 0  # never the most likely
    model.config.tie_word_embeddings = False
    model.get_output_embeddings().weight = torch.nn.Parameter(head, requires_grad=False)
    return model


def force_drafts(engine: Engine, acceptance: float, rng, vocab_size: int) -> None:
    """Replace a part of the tokens that the engine will draft: those of earlier completions."""
    speculation: Any = engine._session._speculation
    for by_seed in speculation._history._by_prompt.values():
        for tokens in by_seed.values():
            for index in range(len(tokens)):
                if rng.random() >= acceptance:
                    tokens[index] = rng.randrange(1, vocab_size)


if __name__ == "__main__":
    main()
