"""Fine-tune a chat model on conversations: packed, loss on the assistant's turns only.

    accelerate launch recipes/sft.py --model path/or/name --data chats.jsonl
    accelerate launch recipes/sft.py --model path/or/name --data chats.jsonl --lora 16
    accelerate launch recipes/sft.py --config sft.yaml --resume

Rows are {"messages": [...]}, {"prompt": ..., "completion": ...} or {"input_ids", "labels"}.
"""

from __future__ import annotations

import argparse
import sys

from nopad.cli import HelpFormatter, checkpoint_path, count, load_tokenizer, positive
from nopad.recipes.support.arguments import parse, run_recipe
from nopad.recipes.support.data_and_model import (
    check_vocabulary,
    naming,
    open_data,
    packed,
    shared_options,
)
from nopad.recipes.support.hf_runner import hf_options, hf_train
from nopad.recipes.support.run_dir import RunFolder


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Every setting, documented."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument_group("model and data").add_argument
    add("--model", help="checkpoint folder or hub name of a causal LM")
    add("--data", help="jsonl[.gz|.zst], parquet, saved `datasets` folder or hub name")
    add("--tokenizer", help="folder or hub name; without it, the model's")
    add("--chat-template", help="Jinja file, for tokenizers that have no template")
    add("--lora", type=count, default=0, metavar="RANK", help="train adapters of this rank only")
    add("--overflow", default="error", choices=["error", "truncate", "split", "drop"],
        help="what becomes of a conversation longer than a pack")  # fmt: skip
    shared_options(add, budget=2048)
    add("--eval-every", type=positive, default=100, help="steps between generations")
    add("--eval-examples", type=count, default=32, help="conversations not trained on but "
        "continued and held against their answers, one in 50 at most; 0: none")  # fmt: skip
    hf_options(parser, "sft", learning_rate=2e-5)
    args = parse(parser, argv, "sft")
    for name in ("model", "data"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is needed")
    return args


def load_data(args: argparse.Namespace):
    """The tokenizer, packs of conversations, and some that are held out."""
    from nopad.recipes.support.holdout import split

    tokenizer = load_tokenizer(args.tokenizer or checkpoint_path(args.model))
    if args.chat_template:
        with open(args.chat_template) as file:
            tokenizer.chat_template = file.read()
    opened = open_data(args, tokenizer, args.text_column)
    source, examples = split(opened, args.eval_examples, args.text_column)
    return tokenizer, packed(args, source, tokenizer, args.overflow), examples


def load_model(args: argparse.Namespace, tokenizer):
    """The model with its weights, and adapters if asked for."""
    import nopad.attention  # noqa: F401
    from transformers import AutoModelForCausalLM

    with naming(args.model):
        name = checkpoint_path(args.model)
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=args.attention)
    check_vocabulary(model, tokenizer)
    if not args.lora:
        return model
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, adapters)


def main(argv: list[str] | None = None) -> None:
    """Fine-tune as the options say."""
    from transformers import set_seed

    args = options(argv)
    folder = RunFolder.of("sft", args)
    set_seed(args.seed)
    tokenizer, data, examples = load_data(args)
    hf_train(args, folder, load_model(args, tokenizer), data, tokenizer, examples)


if __name__ == "__main__":
    sys.exit(run_recipe("sft", main))
