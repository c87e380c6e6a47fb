"""Train a causal LM on packed documents with the HF Trainer.

nopad train-hf                 # a small Llama on Python's standard library
nopad train-hf path/or/name --data corpus.jsonl --budget 8192
accelerate launch -m nopad train-hf --config train.yaml --resume
"""

from __future__ import annotations

import argparse
import sys

from nopad.cli import parser as command_parser
from nopad.recipes.support.arguments import parse_with_config
from nopad.recipes.support.data_and_model import add_data_and_model_options, load_data, load_model
from nopad.recipes.support.hf_runner import add_hf_options, train_with_hf, training_arguments
from nopad.recipes.support.run_dir import RunDir, RunProgress
from nopad.recipes.support.run_recipe import run_recipe


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("train-hf", "[MODEL] [options]", __doc__)
    add_data_and_model_options(parser, budget=2048)
    add_hf_options(parser, "train_hf", learning_rate=1e-3)
    return parse_with_config(parser, argv, "train_hf")


def main(argv: list[str] | None = None, progress: RunProgress | None = None) -> None:
    """Train; an error that the user can fix is a ValueError, OSError or ImportError."""
    args = parse_args(argv)
    from transformers import set_seed  # imported late: --help is quick

    run_dir = RunDir.from_args("train_hf", args, progress)
    if args.data is None and args.steps is None:
        args.steps = 150  # the default corpus is a demonstration: one epoch would take too long
    settings = training_arguments(args)
    set_seed(args.seed)
    tokenizer, data, _ = load_data(args, num_held_out=0)
    train_with_hf(args, settings, run_dir, load_model(args, tokenizer), data, tokenizer)


if __name__ == "__main__":
    sys.exit(run_recipe("train_hf", main))
