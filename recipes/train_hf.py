"""Train a causal LM on documents with the HF Trainer, packed.

accelerate launch recipes/train_hf.py      # a small Llama on Python's sources
accelerate launch recipes/train_hf.py --data corpus.jsonl --model path/or/name --budget 8192
accelerate launch recipes/train_hf.py --config train.yaml --resume
"""

from __future__ import annotations

import argparse
import sys

from nopad.cli import HelpFormatter
from nopad.recipes.support.arguments import parse, run_recipe
from nopad.recipes.support.data_and_model import data_options, load_data, load_model
from nopad.recipes.support.hf_runner import hf_options, hf_train
from nopad.recipes.support.run_dir import RunFolder


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Every setting, documented."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=HelpFormatter,
    )
    data_options(parser, budget=2048)
    hf_options(parser, "train_hf", learning_rate=1e-3)
    return parse(parser, argv, "train_hf")


def main(argv: list[str] | None = None) -> None:
    """Train as the options say."""
    from transformers import set_seed

    args = options(argv)
    folder = RunFolder.of("train_hf", args)
    if args.data is None and args.steps is None:
        args.steps = 150  # a look at Python's sources, not a pass over them
    set_seed(args.seed)
    tokenizer, data, _ = load_data(args, held_out=0)
    hf_train(args, folder, load_model(args, tokenizer), data, tokenizer)


if __name__ == "__main__":
    sys.exit(run_recipe("train_hf", main))
