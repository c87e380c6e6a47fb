"""Train a causal LM on documents with the HF Trainer, packed.

accelerate launch recipes/train_hf.py      # a small Llama on Python's sources
accelerate launch recipes/train_hf.py --data corpus.jsonl --model path/or/name --budget 8192
accelerate launch recipes/train_hf.py --config train.yaml --resume
"""

from __future__ import annotations

import argparse
import sys

from pretrain import load_data, load_model
from settings import hf_options, hf_train, parse


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Every setting, documented."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument_group("model and data").add_argument
    add("--data", help="jsonl[.gz|.zst], parquet, text file or folder, saved `datasets` folder or "
        "hub name; without it, Python's standard library")  # fmt: skip
    add("--text-column", default="text", help="column that holds the text")
    add("--tokenizer", help="folder or hub name; without it, the model's, or one of our own")
    add("--model", help="checkpoint folder, config.json or hub name; without it, a small Llama")
    hf_options(parser, "runs/train_hf")
    return parse(parser, argv)


def main(argv: list[str] | None = None) -> None:
    from transformers import set_seed

    args = options(argv)
    set_seed(args.seed)
    tokenizer, data = load_data(args)
    hf_train(args, load_model(args, tokenizer), data, tokenizer)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"train_hf: {error}", file=sys.stderr)
        sys.exit(2)
