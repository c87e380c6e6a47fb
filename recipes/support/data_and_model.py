"""Build the data and the model of a recipe from its options: tokenizer, packs, examples, model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from nopad.cli import (
    add_data_options,
    add_length_options,
    add_model_argument,
    attention_name,
    count,
    data_kwargs,
    has_weights,
    length_kwargs,
    load_tokenizer,
    load_weights,
    positive,
    resolve_path,
    short_error,
)
from nopad.recipes.support import eval_sampling

NUM_STDLIB_EXAMPLES = 96


def add_data_and_model_options(parser: argparse.ArgumentParser, budget: int) -> None:
    """Add the options of a pretraining recipe that choose data and model."""
    add = parser.add_argument_group("data and model").add_argument
    what = "checkpoint folder, config.json or hub name; default: a small Llama"
    add_model_argument(add, what, required=False)
    add("--data", help=".jsonl[.gz|.zst], .parquet or text file, folder of files, token file, "
        "saved `datasets` folder or hub name; default: Python's standard library")  # fmt: skip
    add("--tokenizer", help="folder or hub name; default: the model's, or a small built-in one")
    add_packing_options(add, budget)


def add_packing_options(add: Any, budget: int, overflow: str = "split") -> None:
    """Add the options of reading and packing that every recipe has."""
    add_data_options(add)
    add_length_options(add, budget, overflow)
    add("--workers", type=count, default=0, help="data loading processes per rank")
    add("--attention", type=attention_name, default="nopad",
        help="attention implementation: nopad, flash_attention_2, sdpa, ...")  # fmt: skip
    add("--sequence-parallel", type=positive, default=1, metavar="RANKS",
        help="ranks that share the tokens of each pack; or sp_size of accelerate")  # fmt: skip
    add("--seed", type=count, default=0, help="seed of new weights and of the order of packs")


def add_eval_option(add: Any, every: int) -> None:
    """Add the option of evaluations during pretraining."""
    add("--eval-every", type=positive, default=every,
        help=f"steps between evaluations; completions are {eval_sampling.DESCRIPTION}")  # fmt: skip


def load_data(args: argparse.Namespace, num_held_out: int = 32):
    """Return the tokenizer, an endless dataset of packs, and held-out examples.

    For data without text, the examples come from Python's standard library.
    """
    from nopad.recipes.support import stdlib_corpus
    from nopad.recipes.support.holdout import hold_out

    stdlib = cache(stdlib_documents)  # read only if needed, and once
    name = args.tokenizer or args.model
    tokenizer = load_tokenizer(name) if name else stdlib_corpus.tokenizer(stdlib()[0])
    with error_context(args.data or "the standard library"):
        if args.data is not None:
            source = open_data(args, tokenizer)
            source, examples = hold_out(source, num_held_out, args.text_column, args.format)
        else:
            texts, examples = stdlib()
            rows = [{args.text_column: text} for text in texts]
            source = rows if name else stdlib_corpus.encoded(texts)
        dataset = packed_dataset(args, source, tokenizer)
        next(iter(dataset))  # bad data raises before anything is written
    return tokenizer, dataset, examples or (stdlib()[1] if num_held_out else [])


def open_data(args: argparse.Namespace, tokenizer):
    """Open `--data` as one source, from which rows can be held out."""
    if not args.data:
        raise ValueError("--data is empty: pass a file or a folder, or omit it")
    from nopad.packing.encoding import Encoder
    from nopad.packing.sources import TokenStore, open_source

    encoder = Encoder(tokenizer, add_eos=data_kwargs(args)["add_eos"])
    opened = open_source(
        args.data,
        text_column=args.text_column,
        eos_token_id=encoder.eos_token_id,
        glob=args.glob,
        dtype=args.dtype,
    )
    return TokenStore(opened) if isinstance(opened, list) else opened


def packed_dataset(args: argparse.Namespace, source, tokenizer):
    """Build an endless dataset of packs."""
    from nopad.packing import PackedDataset

    return PackedDataset(
        source,
        tokenizer=tokenizer,
        seed=args.seed,
        epochs=None,
        **length_kwargs(args),
        **data_kwargs(args),
    )


def stdlib_documents() -> tuple[list[str], list]:
    """Return the standard library's training documents, and its held-out functions as examples."""
    from nopad.recipes.support import stdlib_corpus

    texts, held_out = stdlib_corpus.split(stdlib_corpus.documents())
    functions = map(stdlib_corpus.function_example, held_out)
    return texts, [example for example in functions if example][:NUM_STDLIB_EXAMPLES]


def eval_metric(args: argparse.Namespace) -> Callable[[str, Any], float]:
    """Return how completions are scored: Python by its syntax, other data by its references."""
    from nopad.recipes.support import holdout, stdlib_corpus

    return stdlib_corpus.parses if args.data is None else holdout.matched


@contextmanager
def error_context(subject: str) -> Iterator[None]:
    """Prefix errors with the file or model they are about, unless they name it."""
    try:
        yield
    except (ValueError, OSError) as error:
        if subject in str(error):
            raise
        raise ValueError(f"{subject}: {error}") from error


@contextmanager
def model_errors(name: str) -> Iterator[None]:
    """Turn an error of loading a model, which may be of any type, into one line that names it."""
    try:
        yield
    except ImportError:
        raise  # names what to install
    except Exception as error:
        raise ValueError(f"cannot load {name}: {short_error(error)}") from error


def tensor_parallel() -> dict[str, Any]:
    """Return how to load a model for the `tp_size` of accelerate launch; {} without one.

    Groups of `tp_size` ranks share every layer. Several groups shard their weights by FSDP2.
    """
    from nopad.runtime import find_layout, world_size
    from torch import nn
    from transformers.distributed.configuration_utils import DistributedConfig

    size = find_layout(nn.Module()).tensor.size
    if size == 1:
        return {}
    return {"distributed_config": DistributedConfig(tp_size=size, fsdp_size=world_size() // size)}


def load_checkpoint(path: str, **options: Any) -> Any:
    """Load a causal LM with its weights, for training."""
    with model_errors(path):
        return load_weights(path, **options)


def add_lora(model: Any, rank: int) -> Any:
    """Add LoRA adapters to all linear layers; they name a local base model by its full path."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        model,
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    if os.path.isdir(model.name_or_path):
        config: Any = adapted.peft_config["default"]
        config.base_model_name_or_path = os.path.abspath(model.name_or_path)
    return adapted


def load_model(args: argparse.Namespace, tokenizer):
    """Load MODEL, or build it with new weights if it is only a config; default: a Llama."""
    from nopad.attention import register
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    settings = {"attn_implementation": args.attention}
    if tensor_parallel() and (args.model is None or not has_weights(resolve_path(args.model))):
        raise ValueError(
            "tensor parallelism loads a checkpoint with weights: pass MODEL, or save a new model "
            "with save_pretrained first"
        )
    if args.model is None:
        model = AutoModelForCausalLM.from_config(
            _small_llama(args, tokenizer), trust_remote_code=False, **settings
        )
    else:
        name = resolve_path(args.model)
        if has_weights(name):
            model = load_checkpoint(name, **settings, **tensor_parallel())
        else:
            with model_errors(args.model):
                config = AutoConfig.from_pretrained(name, trust_remote_code=False)
                model = AutoModelForCausalLM.from_config(
                    config, trust_remote_code=False, **settings
                )
    check_vocab_size(model, tokenizer)
    return model.train()  # from_pretrained returns models in eval mode


def check_vocab_size(model, tokenizer) -> None:
    """Raise if the tokenizer has ids that the model has no embedding for."""
    if model.config.get_text_config().vocab_size < len(tokenizer):
        raise ValueError(
            f"the model's vocabulary of {model.config.get_text_config().vocab_size} is too small "
            f"for the tokenizer's {len(tokenizer)} tokens: choose the model's own tokenizer"
        )


def _small_llama(args: argparse.Namespace, tokenizer):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=max(args.budget, 2048),
        tie_word_embeddings=True,
        initializer_range=1 / 14,  # 1 / sqrt(hidden_size): the loss falls from the first step
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
