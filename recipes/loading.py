"""What recipes share: options of data and model, a stream of packs, a causal LM, held-out text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def data_options(parser: argparse.ArgumentParser, budget: int) -> None:
    """Add what says which data and which model."""
    add = parser.add_argument_group("data and model").add_argument
    add("--data", help="jsonl[.gz|.zst], parquet, text file or folder, saved `datasets` folder or "
        "hub name; without it, Python's standard library")  # fmt: skip
    add("--text-column", default="text", help="column that holds the text")
    add("--tokenizer", help="folder or hub name; without it, the model's, or one of our own")
    add("--budget", type=int, default=budget, help="tokens a pack may hold")
    add("--workers", type=int, default=0, help="data loading processes per rank")
    add("--model", help="checkpoint folder, config.json or hub name; without it, a small Llama")
    add("--attention", default="nopad", help="nopad, flash_attention_2, sdpa or eager")
    add("--seed", type=int, default=0, help="of new weights and of the order of packs")


def load_data(args: argparse.Namespace, held_out: int = 32):
    """The tokenizer, an endless stream of packs, and examples that are not in it.

    Data that holds no text is continued from Python's standard library.
    """
    from held_out import split
    from nopad.packing import PackedDataset

    tokenizer, source, examples = _tokenizer_and_source(args)
    with naming(args.data or "the standard library"):
        if args.data is not None:
            source, own = split(args.data, held_out, args.text_column)
            examples = own or examples
        dataset = PackedDataset(
            source,
            tokenizer=tokenizer,
            column=args.text_column,
            budget=args.budget,
            seed=args.seed,
            epochs=None,
        )
        next(iter(dataset))  # bad data speaks up before anything is written
    return tokenizer, dataset, examples


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Let errors inside name what they are about."""
    try:
        yield
    except (ValueError, OSError) as error:
        if what in str(error):
            raise
        raise ValueError(f"{what}: {error}") from error


def load_tokenizer(name: str):
    """The tokenizer of a folder or of the hub."""
    from transformers import AutoTokenizer

    with naming(name):
        return AutoTokenizer.from_pretrained(name)


def _tokenizer_and_source(args: argparse.Namespace):
    """Those of the options, and of the standard library what they leave open."""
    import stdlib_corpus
    from held_out import beginning_of

    texts, others = stdlib_corpus.held_out(stdlib_corpus.documents())
    examples = [example for text in others if (example := beginning_of(text))]
    if args.tokenizer or args.model:
        tokenizer = load_tokenizer(args.tokenizer or args.model)
    else:
        tokenizer = stdlib_corpus.tokenizer(texts)
        if args.data is None:
            return tokenizer, stdlib_corpus.encoded(texts), examples
    return tokenizer, [{args.text_column: text} for text in texts], examples


def load_model(args: argparse.Namespace, tokenizer):
    """The model of `--model`, with its weights if it has some; else a small Llama."""
    import nopad.attention  # noqa: F401  registers the attention implementation
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"attn_implementation": args.attention}
    if args.model is None:
        model = AutoModelForCausalLM.from_config(_small_llama(args, tokenizer), **settings)
    elif Path(args.model).suffix == ".json" or not _has_weights(Path(args.model)):
        with naming(args.model):
            config = AutoConfig.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_config(config, **settings)
    else:
        with naming(args.model):
            model = AutoModelForCausalLM.from_pretrained(args.model, **settings)
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


def _has_weights(folder: Path) -> bool:
    return not folder.is_dir() or any(folder.glob("*.safetensors"))
