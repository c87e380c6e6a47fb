"""A tokenizer's output is a batch of prompts; padding is removed by its mask, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_tokenizer import FakeTokenizer
from nopad.inference import DataParallelEngine, Engine
from transformers import BatchEncoding

GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
ROWS = [[5, 6, 7], [8]]
LEFT = {"input_ids": [[5, 6, 7], [9, 9, 8]], "attention_mask": [[1, 1, 1], [0, 0, 1]]}
RIGHT = {"input_ids": [[5, 6, 7], [8, 9, 9]], "attention_mask": [[1, 1, 1], [1, 0, 0]]}
BATCHES = {
    "lists": {"input_ids": ROWS, "attention_mask": [[1, 1, 1], [1]], "token_type_ids": ROWS},
    "without a mask": {"input_ids": ROWS},
    "padded left": LEFT,
    "padded right": RIGHT,
    "tensors": {key: torch.tensor(value) for key, value in LEFT.items()},
    "arrays": {key: np.array(value) for key, value in RIGHT.items()},
}


@pytest.fixture
def engine(tiny):
    tokenizer = FakeTokenizer(bos_token_id=1, eos_token_id=2)
    tokenizer.pad_token_id = 9
    return Engine(tiny("llama"), tokenizer, page_size=16)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("wrap", [dict, BatchEncoding])
def test_a_tokenizers_output_is_a_batch_of_prompts(engine, kind, wrap):
    want, batch = engine.generate(ROWS, GREEDY), wrap(BATCHES[kind])
    assert engine.generate(batch, GREEDY) == want
    assert DataParallelEngine(engine).generate(batch, GREEDY) == want
    done = {e.request_id: e.completion for e in engine.stream(batch, GREEDY)}
    assert [done[0], done[1]] == want
    assert engine.score(batch, ROWS) == engine.score(ROWS, ROWS)
    assert engine.score_rolling(batch) == engine.score_rolling(ROWS)
    assert [c.prompt_token_ids for c in engine.generate(batch, GREEDY)] == ROWS


def test_one_tokenized_text_is_one_prompt(engine):
    want = engine.generate(ROWS, GREEDY)
    one = [BatchEncoding({"input_ids": row, "attention_mask": [1] * len(row)}) for row in ROWS]
    assert engine.generate(one, GREEDY) == want
    row = {"input_ids": torch.tensor([[9, 8]]), "attention_mask": torch.tensor([[0, 1]])}
    assert engine.generate([ROWS[0], row], GREEDY) == want
    with pytest.raises(ValueError, match=r"one tokenized text; pass a list: tokenizer\(\[text\]\)"):
        engine.generate(one[0], GREEDY)
    with pytest.raises(ValueError, match="holds 2 tokenized texts"):
        engine.generate([LEFT], GREEDY)


PADDED = [[[5, 6], [9, 8]], [[5, 6], [8, 9]], torch.tensor([[5, 6], [9, 8]])]


@pytest.mark.parametrize("ids", PADDED)
def test_padding_without_a_mask_is_refused(engine, ids):
    told = r"prompt 1: .* padding token 9.*attention_mask"
    for prompts in (ids, {"input_ids": ids}):
        for generate in (engine.generate, DataParallelEngine(engine).generate):
            with pytest.raises(ValueError, match=told):
                generate(prompts, GREEDY)
    with pytest.raises(ValueError, match="padding token 9"):
        engine.score(ids, [[3], [4]])
    for alone in ([9, 9, 5], [5, 9, 9]):
        with pytest.raises(ValueError, match=r"prompt 0: .* padding token 9"):
            engine.add_request(alone, GREEDY)


def test_a_padding_token_that_may_be_meant_is_taken(engine):
    assert engine.generate([[5, 6, 9]], GREEDY)[0].error is None, "one prompt has no batch"
    assert engine.generate([[5, 6, 9], [5, 6]], GREEDY)[0].error is None, "rows of two lengths"
    masked = {"input_ids": [[9, 9, 5], [6, 7, 9]], "attention_mask": [[1] * 3] * 2}
    assert [c.prompt_token_ids for c in engine.generate(masked, GREEDY)] == masked["input_ids"]
    engine._tokenizer.tokenizer.pad_token_id = 2  # also ends texts
    assert engine.generate([[2, 5, 2], [5, 6, 7]], GREEDY)[0].error is None
    for padded in ([2, 2, 5], [5, 2, 2]):
        with pytest.raises(ValueError, match="padding token 2"):
            engine.generate([padded], GREEDY)


def test_what_the_engine_cannot_honour_is_named(engine):
    for bad, message in (
        ({"text": ["a"]}, "prompts is one dict; pass a list"),
        ({**LEFT, "pixel_values": 0}, "'pixel_values', which the engine does not take"),
        ({"input_ids": ROWS, "attention_mask": [[1, 0, 1], [1]]}, "masks tokens in its middle"),
        ({"input_ids": ROWS, "attention_mask": [[1, 1], [1]]}, "3 ids and an attention_mask of 2"),
        ({"input_ids": ROWS, "attention_mask": [[1, 1, 1]]}, "2 rows of ids and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(bad, GREEDY)
