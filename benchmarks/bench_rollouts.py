"""Seconds of a GRPO step by part, beside TRL with its own ways to generate.

    python benchmarks/bench_rollouts.py --record benchmarks/results/rollouts.json
    python benchmarks/bench_rollouts.py --shapes tiny --prompts 2 --generations 2    # on a CPU

Prompts have the lengths of GSM8K with 8 examples; random weights sample until a stop id or the
longest completion, so lengths are unknown. Each way trains a few steps in the same process: ours,
TRL with `generate`, with continuous batching, and with vLLM in the same process; one that fails is
reported with its error. Parts of a step are generation (within it, the refresh of the low-precision
copy of the weights), scoring (log-probabilities of the old policy and rewards), and the loss with
its backward. Prints a line for each cell, and one JSON line last.

The record is written after every cell, and cells that it has are not measured again: repeat the
command until all are there. No cell starts after `--seconds`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from nopad.inference import Engine, SamplingParams
from nopad.inference.live_model import CastWeights
from nopad.trainer.with_trl import LiveGRPOTrainer
from record import header, timed, write_record
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

SHAPES = {
    "tiny": (128, 32, 64, 2, 4, 2), "1b": (128256, 2048, 8192, 16, 32, 8),
    "4b": (151936, 2560, 9728, 36, 32, 8),
}  # fmt: skip
"""Vocabulary, hidden size, MLP, layers, heads, key-value heads."""
STOP_IDS_PER = 256
"""One token in this many ends a completion, so that random sampling ends at any length."""
WAYS = {
    "nopad": {},
    "TRL continuous batching": {"use_transformers_continuous_batching": True},
    "TRL generate": {},
    "TRL vLLM": {"use_vllm": True, "vllm_mode": "colocate"},
}
SETTINGS = {"prompts": 8, "generations": 16, "prompt_tokens": 1100, "max_tokens": 1024, "steps": 4}
"""Those that a record's cells share, and their defaults."""
PARTS = {
    "generation": "_generate_single_turn",
    "scoring": "_generate_and_score_completions",
    "step": "training_step",
}
"""Methods of the trainer."""


def main() -> None:
    args, start = parse_args(), time.monotonic()
    settings = {name: getattr(args, name) for name in SETTINGS}
    cells = finished_cells(args.record, settings)
    record = {**header("rollouts"), "settings": settings, "results": cells}
    done = {(cell["shape"], cell["way"]) for cell in cells}
    for shape, way in product(args.shapes, args.ways):
        if (shape, way) in done:
            continue
        if time.monotonic() - start > args.seconds:
            print(f"{shape} {way}: not started after {args.seconds} s; repeat the command")
            continue
        cells.append(measure(shape, way, args))
        write_record(record, args.record)
    print(json.dumps(record, default=str))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1b", "4b"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    for name, default in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--record", type=Path)
    return parser.parse_args()


def finished_cells(path: Path | None, settings: dict[str, int]) -> list[dict[str, Any]]:
    """Return the cells of a record; one with other settings is refused."""
    if path is None or not path.exists():
        return []
    record = json.loads(path.read_text())
    if record["settings"] != settings:
        raise SystemExit(f"{path} was measured with {record['settings']}: choose another --record")
    return record["results"]


def measure(shape: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps in one way; return the parts of its last step, or its error."""
    cell = {"shape": shape, "way": way}
    try:
        cell |= train(shape, way, args)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        cell["error"] = (f"{type(error).__name__}: {error}".strip().splitlines() or [""])[0][:300]
    gc.collect()
    torch.cuda.empty_cache()
    print("  ".join(f"{name} {value}" for name, value in cell.items()), flush=True)
    return cell


def train(shape: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = make_model(shape), make_tokenizer(shape)
    on_gpu, data = torch.cuda.is_available(), prompts(shape, args)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.generations,
            gradient_accumulation_steps=args.prompts,
            num_generations=args.generations,
            max_completion_length=args.max_tokens,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **WAYS[way],
        )
        kind: Any = LiveGRPOTrainer if way == "nopad" else GRPOTrainer
        more: dict[str, Any] = {"engine": Engine} if way == "nopad" else {}
        more |= {"train_dataset": data, "processing_class": tokenizer}
        trainer = kind(model, distinct_tokens, args=config, **more)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with time_parts(trainer) as seconds:
            trainer.train()
    return {**summary(trainer, seconds, args), **difference(way, trainer, data)}


@contextmanager
def time_parts(trainer: Any) -> Iterator[dict[str, list[float]]]:
    """Measure calls of the parts, nested ones too, by optimizer step."""
    seconds: dict[str, list[float]] = {part: [] for part in (*PARTS, "refresh")}

    class NewStep(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            for parts in seconds.values():
                parts.append(0.0)

    def measured(part: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            spent, result = timed(lambda: call(*args, **kwargs))
            seconds[part][-1] += spent
            return result

        return run

    trainer.add_callback(NewStep())
    for part, name in PARTS.items():
        setattr(trainer, name, measured(part, getattr(trainer, name)))
    timed_refresh = measured("refresh", CastWeights.refresh)
    with patch.object(CastWeights, "refresh", lambda *args: timed_refresh(*args)):
        yield seconds


def summary(trainer: Any, seconds: dict[str, list[float]], args: argparse.Namespace) -> dict:
    """Return the parts of the last step: early ones compile, and learn how much memory is left."""
    step, scoring, generation = (seconds[part][-1] for part in ("step", "scoring", "generation"))
    lines = [line for line in trainer.state.log_history if "completions/mean_length" in line]
    parts = {
        "step_s": step,
        "generation_s": generation,
        "refresh_s": seconds["refresh"][-1],
        "scoring_s": scoring - generation,
        "loss_and_backward_s": step - scoring,
        "steps_per_hour": 3600 / step,
        "mean_length": lines[-1]["completions/mean_length"] if lines else float("nan"),
    }
    if torch.cuda.is_available():
        parts["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return {name: float(f"{value:.4g}") for name, value in parts.items()}


def difference(way: str, trainer: Any, data: Dataset) -> dict[str, Any]:
    """Return how far log-probabilities of the engine are from the training forward's in bf16.

    Beside them, how far those of the training forward are from its own in fp32: no engine can be
    expected to be closer, unless it rounds every product alike.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    dtypes = {str(weight.dtype) for weight in model.parameters()}
    result: dict[str, Any] = {"weights": ", ".join(sorted(dtypes))}
    if way == "nopad":
        rows = trainer.processing_class(data["prompt"][:4])["input_ids"]
        params = SamplingParams(max_tokens=64, logprobs=0, ignore_eos=True)
        precision = torch.autocast(model.device.type, torch.bfloat16)
        with precision:
            completions = trainer.engine.generate(rows, params)
            training = log_probs(model, rows, completions)
        exact = log_probs(model, rows, completions)
        engine = torch.tensor([t.logprob for each in completions for t in each.logprobs])
        pairs = {"logprob_difference": engine, "logprob_rounding": exact}
        for name, other in pairs.items():
            result[name] = float(f"{(training - other).abs().mean():.3g}")
    return result


@torch.no_grad()
def log_probs(model: Any, prompts: list[list[int]], completions: list[Any]) -> torch.Tensor:
    """Return the log-probabilities of all new tokens by a forward of each sequence alone."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([*prompt, *completion.token_ids], device=model.device)
        new = ids[len(prompt) :, None]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, -len(new) - 1 : -1]
        found.append(logits.float().log_softmax(-1).gather(1, new)[:, 0].cpu())
    return torch.cat(found)


def make_model(shape: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    vocab, hidden, inner, layers, heads, kv_heads = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=list(range(max(1, vocab // STOP_IDS_PER))),
    )
    return LlamaForCausalLM(config)


def make_tokenizer(shape: str) -> PreTrainedTokenizerFast:
    words = {f"w{n}": n for n in range(SHAPES[shape][0])}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    from tokenizers.pre_tokenizers import WhitespaceSplit

    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w0", pad_token="w0")


def prompts(shape: str, args: argparse.Namespace) -> Dataset:
    """Return prompts of about `prompt_tokens`, as the examples and questions of GSM8K vary."""
    rng, vocab = random.Random(0), SHAPES[shape][0]
    rows = []
    for _ in range(args.prompts * args.steps):
        length = max(2, int(args.prompt_tokens * rng.uniform(0.9, 1.2)))
        rows.append({"prompt": " ".join(f"w{rng.randrange(1, vocab)}" for _ in range(length))})
    return Dataset.from_list(rows)


def distinct_tokens(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


if __name__ == "__main__":
    main()
