"""What recipes share: options of data and model, a stream of packs, a causal LM, held-out text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from nopad.cli import (
    add_data_options,
    attention_name,
    count,
    data_kwargs,
    has_weights,
    load_tokenizer,
    positive,
    resolve_path,
)


def data_options(parser: argparse.ArgumentParser, budget: int) -> None:
    """Add what says which data and which model."""
    add = parser.add_argument_group("data and model").add_argument
    add("--data", help="jsonl[.gz|.zst], parquet, text file or folder, tokens, saved `datasets` "
        "folder or hub name; without it, Python's standard library")  # fmt: skip
    add("--model", help="checkpoint folder, config.json or hub name; without it, a small Llama")
    add("--tokenizer", help="folder or hub name; without it, the model's, or one of our own")
    shared_options(add, budget)


def shared_options(add: Any, budget: int) -> None:
    """What every recipe can be told about reading and packing."""
    add("--text-column", default="text", help="column that holds the text")
    add_data_options(add)
    add("--budget", type=positive, default=budget, help="tokens a pack may hold")
    add("--workers", type=count, default=0, help="data loading processes per rank")
    add(
        "--attention",
        type=attention_name,
        default="nopad",
        help="nopad, flash_attention_2, sdpa ...",
    )
    add("--seed", type=count, default=0, help="of new weights and of the order of packs")


def load_data(args: argparse.Namespace, held_out: int = 32):
    """The tokenizer, an endless stream of packs, and examples that are not in it.

    Data that holds no text is continued from Python's standard library.
    """
    import stdlib_corpus
    from nopad.recipes.support.holdout import split

    named = args.tokenizer or args.model
    tokenizer = load_tokenizer(named) if named else stdlib_corpus.tokenizer(library()[0])
    with naming(args.data or "the standard library"):
        if args.data is not None:
            opened = open_data(args, tokenizer, args.text_column)
            source, examples = split(opened, held_out, args.text_column)
        else:
            texts, examples = library()
            rows = [{args.text_column: text} for text in texts]
            source = rows if named else stdlib_corpus.encoded(texts)
        dataset = packed(args, source, tokenizer)
        next(iter(dataset))  # bad data speaks up before anything is written
    return tokenizer, dataset, examples or (library()[1] if held_out else [])


def open_data(args: argparse.Namespace, tokenizer, column: str):
    """The source of `--data`, so that some of it can be held out."""
    from nopad.packing.encoding import Encoder
    from nopad.packing.sources import TokenStore, open_source

    encoder = Encoder(tokenizer, text_column=column, add_eos=data_kwargs(args)["add_eos"])
    opened = open_source(
        args.data,
        text_column=column,
        eos_token_id=encoder.eos_token_id,
        glob=args.glob,
        dtype=args.dtype,
    )
    return TokenStore(opened) if isinstance(opened, list) else opened


def packed(args: argparse.Namespace, source, tokenizer, overflow: str = "split"):
    """An endless stream of packs, as the options say."""
    from nopad.packing import PackedDataset

    return PackedDataset(
        source,
        tokenizer=tokenizer,
        text_column=args.text_column,
        budget=args.budget,
        overflow=overflow,
        seed=args.seed,
        epochs=None,
        **data_kwargs(args),
    )


@cache
def library() -> tuple[list[str], list]:
    """Documents of Python's standard library to train on, and examples of the others."""
    import stdlib_corpus
    from nopad.recipes.support.holdout import beginning_of

    texts, others = stdlib_corpus.held_out(stdlib_corpus.documents())
    return texts, [example for text in others if (example := beginning_of(text))]


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Let errors inside name what they are about."""
    try:
        yield
    except (ValueError, OSError) as error:
        if what in str(error):
            raise
        raise ValueError(f"{what}: {error}") from error


def load_model(args: argparse.Namespace, tokenizer):
    """The model of `--model`, with its weights if it has some; else a small Llama."""
    import nopad.attention  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"attn_implementation": args.attention}
    if args.model is None:
        model = AutoModelForCausalLM.from_config(_small_llama(args, tokenizer), **settings)
    else:
        with naming(args.model):
            name = resolve_path(args.model)
            if has_weights(name):
                model = AutoModelForCausalLM.from_pretrained(name, **settings)
            else:
                config = AutoConfig.from_pretrained(name)
                model = AutoModelForCausalLM.from_config(config, **settings)
    check_vocabulary(model, tokenizer)
    return model.train()  # what was loaded comes in evaluation


def check_vocabulary(model, tokenizer) -> None:
    """Refuse a tokenizer whose ids the model has no rows for."""
    if model.config.get_text_config().vocab_size < len(tokenizer):
        raise ValueError(
            f"the model's vocabulary of {model.config.get_text_config().vocab_size} is too small "
            f"for the tokenizer's {len(tokenizer)} tokens: choose the tokenizer it was made for"
        )


def _small_llama(args: argparse.Namespace, tokenizer):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(args.budget, 2048),
        tie_word_embeddings=True,
        initializer_range=1 / 16,  # 1 / sqrt(hidden size): it learns from the first step
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
