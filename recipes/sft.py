"""Fine-tune a chat model on packed conversations, with the loss on the assistant's turns only.

    nopad sft path/or/name --data chats.jsonl
    nopad sft path/or/name --data chats.jsonl --lora 16
    accelerate launch -m nopad sft --config sft.yaml --resume

Rows are {"messages": [...]}, {"prompt": ..., "completion": ...} or {"input_ids", "labels"}.
"""

from __future__ import annotations

import argparse
import os
import sys

from nopad.cli import (
    add_chat_template_option,
    add_model_argument,
    checkpoint_path,
    count,
    load_tokenizer,
    positive,
    set_chat_template,
)
from nopad.cli import parser as command_parser
from nopad.recipes.support import eval_sampling
from nopad.recipes.support.arguments import parse_with_config
from nopad.recipes.support.data_and_model import (
    add_lora,
    add_packing_options,
    check_vocab_size,
    load_checkpoint,
    open_data,
    packed_dataset,
)
from nopad.recipes.support.hf_runner import add_hf_options, train_with_hf, training_arguments
from nopad.recipes.support.run_dir import RunDir, RunProgress
from nopad.recipes.support.run_lock import is_main_process
from nopad.recipes.support.run_recipe import run_recipe


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("sft", "MODEL --data FILE [options]", __doc__)
    add = parser.add_argument_group("model and data").add_argument
    add_model_argument(add, "checkpoint folder or hub name of a causal LM", required=False)
    add("--data", help=".jsonl[.gz|.zst], .parquet, saved `datasets` folder or hub name")
    add("--tokenizer", help="folder or hub name; default: the model's")
    add_chat_template_option(add)
    add("--lora", type=count, default=0, metavar="RANK",
        help="train LoRA adapters of this rank; 0 trains all weights")  # fmt: skip
    add_packing_options(add, budget=2048, overflow="error")  # a split answer loses its question
    add("--eval-every", type=positive, help="steps between evaluations; default: 100")
    add("--eval-examples", type=count, default=32, help="conversations to hold out for evaluation, "
        f"about one in 50, at least one: their last answer is {eval_sampling.DESCRIPTION}, and "
        "compared (matched: the part of it that the text starts with); 0: none")  # fmt: skip
    add_hf_options(parser, "sft", learning_rate=2e-5)
    args = parse_with_config(parser, argv, "sft")
    for name, value in (("MODEL", args.model), ("--data", args.data)):
        if value is None:
            raise ValueError(f"{name} is required")
    return args


def load_data(args: argparse.Namespace):
    """Return the tokenizer, a dataset of packed conversations, and held-out examples."""
    from nopad.recipes.support.holdout import hold_out

    tokenizer = load_tokenizer(args.tokenizer or checkpoint_path(args.model))
    if args.chat_template:
        set_chat_template(tokenizer, args.chat_template)
    source = open_data(args, tokenizer)
    source, examples = hold_out(source, args.eval_examples, args.text_column, args.format)
    data = packed_dataset(args, source, tokenizer)  # first: rows that cannot be used are an error
    check_evaluation(args, examples)
    return tokenizer, data, examples


def check_evaluation(args: argparse.Namespace, examples: list) -> None:
    """Refuse evaluations that are asked for and would be of nothing; fill in the default."""
    if args.eval_every is not None and not examples:
        raise ValueError(
            f"--eval-every {args.eval_every}: no row of {args.data} can be held out, since fewer "
            "than two have an answer in text to compare with, or --eval-examples is 0; omit it"
        )
    if args.eval_examples and not examples and os.environ.get("RANK", "0") == "0":
        print(f"no evaluation: fewer than two rows of {args.data} have an answer in text")
    args.eval_every = args.eval_every or 100


def load_model(args: argparse.Namespace, tokenizer):
    """Load the pretrained model; add LoRA adapters with `--lora`."""
    from nopad.attention import register

    register()
    model = load_checkpoint(checkpoint_path(args.model), attn_implementation=args.attention)
    check_vocab_size(model, tokenizer)
    if not args.lora:
        return model
    model = add_lora(model, args.lora)
    if is_main_process():
        trained, total = model.get_nb_trainable_parameters()
        print(f"LoRA of rank {args.lora}: trains {trained:,} of {total:,} parameters")
    return model


def main(argv: list[str] | None = None, progress: RunProgress | None = None) -> None:
    """Fine-tune; an error that the user can fix is a ValueError, OSError or ImportError."""
    args = parse_args(argv)
    from transformers import set_seed  # imported late: --help is quick

    run_dir = RunDir.from_args("sft", args, progress)
    settings = training_arguments(args)
    set_seed(args.seed)
    tokenizer, data, examples = load_data(args)
    train_with_hf(args, settings, run_dir, load_model(args, tokenizer), data, tokenizer, examples)


if __name__ == "__main__":
    sys.exit(run_recipe("sft", main))
