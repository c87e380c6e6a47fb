"""Build the data and the model of a recipe from its options."""

from __future__ import annotations

import argparse
from typing import Any

from nopad.cli import (
    data_kwargs,
    has_weights,
    length_kwargs,
    load_tokenizer,
    load_weights,
    model_errors,
    resolve_path,
)


def load_data(args: argparse.Namespace, num_held_out: int = 32):
    """Return the tokenizer, an endless dataset of packs, and held-out examples."""
    from nopad.recipes.support import stdlib_corpus
    from nopad.recipes.support.holdout import hold_out

    name = args.tokenizer or args.model
    needs_corpus = args.data is None or name is None
    texts, examples = stdlib_corpus.documents() if needs_corpus else ([], [])
    tokenizer = load_tokenizer(name) if name else stdlib_corpus.train_tokenizer(texts)
    source: Any = [{args.text_column: text} for text in texts]
    if args.data is not None:
        source = open_data(args, tokenizer)
        source, examples = hold_out(source, num_held_out, args.text_column, args.format)
    return tokenizer, packed_dataset(args, source, tokenizer), examples


def open_data(args: argparse.Namespace, tokenizer: Any):
    """Open `--data` as one source, from which rows can be held out."""
    if not args.data:
        raise ValueError("--data is empty: pass a file or a folder, or omit it")
    from nopad.packing.encoding import Encoder
    from nopad.packing.sources import TokenStore, open_source

    encoder = Encoder(tokenizer, add_eos=data_kwargs(args)["add_eos"])
    options = {"text_column": args.text_column, "glob": args.glob, "dtype": args.dtype}
    opened = open_source(args.data, eos_token_id=encoder.eos_token_id, **options)
    return TokenStore(opened) if isinstance(opened, list) else opened


def packed_dataset(args: argparse.Namespace, source: Any, tokenizer: Any):
    """Build an endless dataset of packs."""
    from nopad.packing import PackedDataset

    options = {**length_kwargs(args), **data_kwargs(args)}
    return PackedDataset(source, tokenizer=tokenizer, seed=args.seed, epochs=None, **options)


def load_model(args: argparse.Namespace, tokenizer: Any, **parallel: Any):
    """Load MODEL, or build it with new weights if it is only a config; default: a small Llama."""
    from nopad.attention import register
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    options: Any = {"attn_implementation": args.attention}
    if args.model is None:
        config: Any = small_llama(args, tokenizer)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    name = resolve_path(args.model)
    with model_errors(name):
        if has_weights(name):
            return load_weights(name, **options, **parallel)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)


def small_llama(args: argparse.Namespace, tokenizer: Any):
    """Return the config of a Llama that learns the default corpus on a CPU."""
    from transformers import LlamaConfig

    sizes: Any = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2}
    return LlamaConfig(
        **sizes,
        vocab_size=len(tokenizer),
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=max(args.budget, 2048),
        tie_word_embeddings=True,
        initializer_range=1 / 14,  # 1 / sqrt(hidden_size): the loss falls from the first step
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
