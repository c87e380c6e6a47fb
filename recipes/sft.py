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
    load_weights,
    model_errors,
    positive,
    set_chat_template,
)
from nopad.cli import parser as command_parser
from nopad.recipes.support import arguments
from nopad.recipes.support.data_and_model import open_data, packed_dataset
from nopad.recipes.support.run_dir import RunDir, is_main_process
from nopad.recipes.support.run_recipe import run_recipe
from nopad.recipes.train_hf import add_training_options, fit, training_arguments


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("sft", "MODEL --data FILE [options]", __doc__)
    add = parser.add_argument_group("model and data").add_argument
    add_model_argument(add, "checkpoint folder or hub name of a causal LM", required=False)
    add("--data", help=".jsonl[.gz|.zst], .parquet, saved `datasets` folder or hub name")
    add("--tokenizer", help="folder or hub name; default: the model's")
    add_chat_template_option(add)
    add("--lora", type=count, default=0, metavar="RANK",
        help="train LoRA adapters of this rank; 0 trains all weights")  # fmt: skip
    # A split conversation has answers without their question: longer ones are an error.
    arguments.add_packing_options(add, budget=2048, overflow="error")
    add("--eval-every", type=positive, default=100, help="steps between evaluations")
    add("--eval-examples", type=count, default=32, help="conversations to hold out for evaluation, "
        "about one in 50, at least one. Their last answer is sampled and compared (matched: the "
        "fraction of it that the text starts with). 0: none")  # fmt: skip
    add_training_options(parser, "sft", learning_rate=2e-5)
    args = arguments.parse_with_config(parser, argv, "sft")
    for name, value in (("MODEL", args.model), ("--data", args.data)):
        if value is None:
            raise ValueError(f"{name} is required")
    return args


def train(args: argparse.Namespace, run: RunDir) -> None:
    """Fine-tune all weights, or LoRA adapters."""
    from transformers import set_seed  # imported late: --help is quick

    settings = training_arguments(args)  # joins the ranks, on which data and model depend
    set_seed(args.seed)
    tokenizer, data, examples = load_data(args)
    held_out = examples if args.eval_examples else None
    fit(args, run, settings, load_model(args), data, tokenizer, held_out)


def load_data(args: argparse.Namespace):
    """Return the tokenizer, a dataset of packed conversations, and held-out examples."""
    from nopad.recipes.support.holdout import hold_out

    tokenizer = load_tokenizer(args.tokenizer or checkpoint_path(args.model))
    if args.chat_template:
        set_chat_template(tokenizer, args.chat_template)
    source = open_data(args, tokenizer)
    source, examples = hold_out(source, args.eval_examples, args.text_column, args.format)
    return tokenizer, packed_dataset(args, source, tokenizer), examples


def load_model(args: argparse.Namespace):
    """Load the pretrained model; add LoRA adapters to all linear layers with `--lora`."""
    from nopad.attention import register

    register()
    path = checkpoint_path(args.model)
    with model_errors(path):
        model = load_weights(path, attn_implementation=args.attention)
    if not args.lora:
        return model
    from peft import LoraConfig, get_peft_model

    rank = {"r": args.lora, "lora_alpha": 2 * args.lora}
    config = LoraConfig(**rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    if os.path.isdir(path):  # so that adapters find their base model from other folders too
        adapted.peft_config["default"].base_model_name_or_path = os.path.abspath(path)
    if is_main_process():
        trained, total = adapted.get_nb_trainable_parameters()
        print(f"LoRA of rank {args.lora}: trains {trained:,} of {total:,} parameters")
    return adapted


if __name__ == "__main__":
    sys.exit(run_recipe("sft", parse_args, train))
