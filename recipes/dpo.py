"""Train a model on pairs of a preferred and a rejected answer (DPO), packed without padding.

    nopad dpo path/or/name --data gsm8k.jsonl
    nopad dpo path/or/name --data pairs.jsonl --lora 16
    accelerate launch -m nopad dpo --config dpo.yaml --resume

Rows are {"prompt", "chosen", "rejected"}, as text or messages, or {"question", "answer"} of GSM8K,
whose rejected answer is the right one with one number changed.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from typing import Any

from nopad.cli import (
    add_model_argument,
    checkpoint_path,
    count,
    load_tokenizer,
    load_weights,
    model_errors,
    number_above_0,
    positive,
)
from nopad.cli import parser as command_parser
from nopad.recipes.support import arguments
from nopad.recipes.support.run_dir import RunDir
from nopad.recipes.support.run_recipe import run_recipe
from nopad.recipes.train_hf import train_in_folder

SHOWN = ("rewards/accuracies", "rewards/margins", "loss")
"""Metrics in the plot of a run."""
PAIR = {"prompt", "chosen", "rejected"}
NUMBER = re.compile(r"\d+")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("dpo", "MODEL --data FILE [options]", __doc__)
    add = parser.add_argument_group("model and data").add_argument
    add_model_argument(add, "checkpoint folder or hub name of a causal LM", required=False)
    add("--data", metavar="FILE", help=".jsonl or .parquet")
    add("--tokenizer", help="folder or hub name; default: the model's")
    add("--max-length", type=positive, default=1024, help="longest prompt and answer, in tokens")
    add("--lora", type=count, default=0, metavar="RANK",
        help="train LoRA adapters of this rank; 0 trains all weights")  # fmt: skip
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=200, help="optimizer steps")
    add("--batch", type=positive, default=8, help="pairs per step and device")
    add("--beta", type=number_above_0, default=0.1, help="strength of the reference")
    add("--learning-rate", type=number_above_0, default=1e-6, help="highest learning rate")
    add = parser.add_argument_group("run").add_argument
    add("--seed", type=count, default=0, help="of the changed numbers and the order of pairs")
    arguments.add_run_options(add, "dpo", save_every=100)
    args = arguments.parse_with_config(parser, argv, "dpo")
    for name, value in (("MODEL", args.model), ("--data", args.data)):
        if value is None:
            raise ValueError(f"{name} is required")
    return args


def train(args: argparse.Namespace, run: RunDir) -> None:
    """Train all weights, or LoRA adapters."""
    import torch  # imported late: --help is quick
    from nopad.trainer.with_trl import PackedDPOTrainer
    from transformers import set_seed
    from trl.trainer.dpo_config import DPOConfig

    settings = DPOConfig(
        str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        beta=args.beta,
        learning_rate=args.learning_rate,
        max_length=args.max_length,
        precompute_ref_log_probs=not args.lora,  # so that one model is in memory
        bf16=torch.accelerator.is_available(),
        use_cpu=not torch.accelerator.is_available(),
        seed=args.seed,
        save_steps=args.save_every,
        logging_steps=min(10, args.steps),
        report_to="none",
    )
    set_seed(args.seed)
    path = checkpoint_path(args.model)
    with model_errors(path):
        model, tokenizer = load_weights(path), load_tokenizer(args.tokenizer or path)
    trainer = PackedDPOTrainer(
        model,
        args=settings,
        train_dataset=load_pairs(args.data, args.seed),
        processing_class=tokenizer,
        peft_config=lora_config(args.lora) if args.lora else None,
    )
    train_in_folder(trainer, args, run)
    if trainer.is_world_process_zero():
        from nopad.recipes.support.run_summary import plot_metrics

        print("\n".join(plot_metrics(run, trainer.state.log_history, SHOWN)))


def lora_config(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def load_pairs(path: str, seed: int) -> Any:
    """Read pairs from a file; rows of GSM8K become pairs."""
    from datasets import Dataset

    name = str(path)
    rows: Any = Dataset.from_parquet(name) if name.endswith(".parquet") else Dataset.from_json(name)
    columns = set(rows.column_names)
    if columns >= PAIR:
        return rows.select_columns(sorted(PAIR))
    if not columns >= {"question", "answer"}:
        raise ValueError(
            f"{path} has the columns {sorted(columns)}: pairs need prompt, chosen and rejected, "
            "or question and answer"
        )
    return Dataset.from_list(
        [to_pair(row["question"], row["answer"], seed + n) for n, row in enumerate(rows)]
    )


def to_pair(question: str, answer: str, seed: int = 0) -> dict[str, str]:
    """Return a solution and a copy in which one number, not always the last, is wrong.

    >>> to_pair("2+2?", "2+2=4")["rejected"] != "2+2=4"
    True
    """
    draw, numbers = random.Random(seed), [*NUMBER.finditer(answer)]
    if not numbers:
        raise ValueError(f"the answer {answer[:40]!r} has no number to change")
    place = draw.choice(numbers)
    wrong = str(int(place.group()) + draw.randint(1, 9))
    rejected = answer[: place.start()] + wrong + answer[place.end() :]
    return {"prompt": f"{question}\n", "chosen": answer, "rejected": rejected}


if __name__ == "__main__":
    sys.exit(run_recipe("dpo", parse_args, train))
