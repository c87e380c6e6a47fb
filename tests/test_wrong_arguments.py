"""Wrong types and values of public constructors raise one line at once; near types are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nopad import (
    DataParallelEngine,
    Engine,
    PackedCollator,
    PackedDataset,
    Packer,
    PaddedCollator,
    pack_lengths,
)
from nopad.inference import batch_invariant
from nopad.trainer import EvaluationLoader, GenerationEval, PackedLoader
from nopad.trainer.evaluation import regex_match
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)


def data(**settings):
    return list(PackedDataset([[1, 2], [3, 4, 5]], **{"budget": 8, **settings}))


def loader(kind=PackedLoader, **settings):
    return kind(PackedDataset([[1, 2], [3, 4, 5]], budget=8), **settings)


def engine(tokenizer=None, **settings):
    return Engine(AutoModelForCausalLM.from_config(CONFIG), tokenizer, **settings)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: data(balance="no"), "balance='no': pass True or False"),
        (lambda: data(pretokenize="yes"), "pretokenize='yes': pass True or False"),
        (lambda: data(continue_positions=1), "continue_positions=1: pass True or False"),
        (lambda: data(stopping_strategy="last"), "stopping_strategy='last': choose first_exh"),
        (lambda: data(pool=0), "pool=0: pass at least 1"),
        (lambda: data(add_eos=-1), "add_eos=-1: pass True for the tokenizer's eos, an id"),
        (lambda: data(add_eos=7), "add_eos=7 applies to text, which needs tokenizer=; ready"),
        (lambda: data(glob="*.txt"), "glob='*.txt' selects files in a folder, but no source is"),
        (lambda: data(dtype="uint16"), "dtype='uint16' is for flat .bin files, but no source is"),
        (lambda: PackedDataset(__file__, tokenizer=len, budget=8, glob="*"), "glob='*' selects"),
        (lambda: data(text_column=5), "text_column=5: pass the name of a column"),
        (lambda: data(rank="0", world_size="1"), "rank '0' must be an integer"),
        (lambda: data(pad_token_id=10**30), "pass an id of the vocabulary"),
        (lambda: PackedDataset("", budget=8), "the name of the source is empty"),
        (lambda: PackedDataset(".", budget=8, glob="/etc/*"), "a pattern inside the folder"),
        (lambda: pack_lengths([1, 2], 10**30), "a pack has at most 268435456 tokens"),
        (lambda: pack_lengths([1, 2], -1), "budget -1: a pack has 1 to"),
        (lambda: Packer(8, pad_token_id="a"), "pad_token_id 'a' must be an integer"),
        (lambda: Packer(8, continue_positions="a"), "continue_positions='a': pass True or False"),
        (lambda: PackedCollator(seq_idx="no"), "seq_idx='no': pass True or False"),
        (lambda: PackedCollator(fixed_sequences="8"), "fixed_sequences='8': the padding"),
        (lambda: PackedCollator(pad_token_id=10**30), "pass any id of the vocabulary"),
        (lambda: PaddedCollator(pad_token_id=-1), "pad_token_id=-1: pass any id"),
        (lambda: PaddedCollator(pad_token_id=1.5), "pad_token_id=1.5: pass any id"),
        (
            lambda: PaddedCollator(pad_to_multiple_of=None),
            "pad_to_multiple_of=None: pass at least 1",
        ),
        (lambda: PackedLoader([[1, 2]]), "dataset is a list: pass a PackedDataset"),
        (lambda: loader(accumulation_steps=1.5), "accumulation_steps=1.5: a step needs at least"),
        (lambda: loader(drop_last="no"), "drop_last='no': pass True or False"),
        (lambda: loader(EvaluationLoader, limit=-1), "limit=-1: pass a number of packs, or None"),
        (lambda: Engine(None), "NoneType is not a causal LM"),
        (lambda: Engine(CONFIG), "LlamaConfig is not a causal LM"),
        (lambda: Engine(nn.Linear), "Linear is not a causal LM"),
        (lambda: engine(5), "tokenizer is a int: pass a Hugging Face tokenizer"),
        (lambda: engine(max_num_seqs=10**30), "it must be at most 2147483647"),
        (lambda: DataParallelEngine("engine"), "engine is a str; pass an Engine"),
        (lambda: batch_invariant(0).__enter__(), "max_length is 0; it must be an integer"),
        (lambda: regex_match(None), "None is not a regular expression"),
        (lambda: regex_match(b"a"), "b'a' is not a regular expression"),
        (lambda: GenerationEval(len, 5), "examples is a int; pass a list of Example"),
    ],
)
def test_a_wrong_argument_is_told_in_one_line(call, told):
    with pytest.raises(ValueError, match=r"\w") as caught:
        call()
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_and_flags_of_numpy_are_right():
    one, eight = np.int64(1), np.int32(8)
    packs = data(budget=eight, pool=one, balance=np.bool_(False), rank=np.int64(0), world_size=one)
    assert sum(len(pack.tokens) for pack in packs) == 5
    assert PackedCollator(seq_idx=np.bool_(True), pad_token_id=one)(ROWS)["input_ids"].numel() == 5
    padded = PaddedCollator(pad_token_id=one, pad_to_multiple_of=eight)(ROWS)["input_ids"]
    assert padded.shape == (2, 8) and padded.dtype == torch.int64
    assert engine(max_num_seqs=eight, seed=one)
