"""A Hugging Face tokenizer of one token per letter, made here."""

from __future__ import annotations


def char_tokenizer(letters: str = "abcdefgh"):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {"<eos>": 0, "<unk>": 1} | {letter: n for n, letter in enumerate(letters, start=2)}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")
