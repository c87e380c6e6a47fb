"""Invalid engine arguments raise at construction, in one line."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nopad.inference import Engine, settings

BAD = [
    ("memory", None),
    ("memory", float("nan")),
    ("memory", float("inf")),
    ("memory", 0),
    ("memory", True),
    ("memory", "0.5"),
    ("seed", "a"),
    ("seed", 1.5),
    ("dtype", "bfloat16"),
    ("dtype", torch.int8),
    ("dtype", torch.float8_e4m3fn),
    ("max_waiting", 0),
    ("max_waiting", "a"),
    ("max_num_seqs", 2.5),
    ("max_num_batched_tokens", True),
    ("page_size", 17),
    ("max_model_len", -3),
    ("keep_memory", "no"),
    ("cuda_graphs", 1),
    ("speculate", "draft"),
    ("speculate", True),
    ("kv_dtype", "fp16"),
    ("kv_dtype", torch.int8),
    ("debug", None),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_named_where_it_is_given(tiny, name, value):
    with pytest.raises(ValueError, match=rf"^{name} is .*; ") as caught:
        Engine(tiny("llama"), **{name: value})
    assert repr(value) in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers(tiny):
    settings = {"max_num_seqs": np.int64(2), "memory": np.float32(0.25), "seed": np.uint8(3)}
    (done,) = Engine(tiny("llama"), **settings).generate([[3, 4]], {"max_tokens": 2})
    assert done.error is None


def test_no_position_is_read_past_a_learned_table(tiny):
    model = tiny("gpt2")  # has 256 positions; the last token of a sequence is never run
    (done,) = Engine(model, max_model_len=257).generate([[3, 4, 5]], {"max_tokens": 400})
    assert done.error is None and len(done.token_ids) <= 254
    with pytest.raises(ValueError, match="max_model_len is 258; the model has 256 positions"):
        Engine(model, max_model_len=258)
    Engine(tiny("llama"), max_model_len=1000)  # rotary positions have no table


def test_position_tables_are_found_by_any_name_and_without_their_offset():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "opt", vocab_size=20, hidden_size=8, ffn_dim=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=12, word_embed_proj_dim=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="max_model_len is 14; the model has 12 positions"):
        Engine(model, max_model_len=14)


def test_the_vision_towers_positions_are_not_the_texts():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8,
        "max_position_embeddings": 64,
    }  # fmt: skip
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config).eval()
    params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    (done,) = Engine(model, page_size=16).generate([list(range(3, 33))], params)
    with torch.no_grad():
        ids = torch.tensor([[*range(3, 33), *done.token_ids]])
        want = model(input_ids=ids).logits[0].argmax(-1)[29:-1]
    assert done.token_ids == want.tolist()


def tokens_while_decoding(monkeypatch, tiny, ranks: int = 1, **arguments) -> int | None:
    """What an engine on a GPU would be built with."""
    model = tiny("llama")
    monkeypatch.setattr(settings, "replica_ranks", lambda _: range(ranks))
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(model, "parameters", lambda: iter([on_gpu]))
    names = ("page_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_waiting")
    defaults = dict.fromkeys((*names, "target_itl", "speculate", "kv_dtype")) | {"memory": 0.5}
    flags = {"keep_memory": True, "dtype": None, "cuda_graphs": True, "debug": False}
    return settings.resolve_settings(
        model, **defaults | flags | arguments
    ).max_tokens_while_decoding


def test_steps_that_requests_wait_for_are_smaller_by_default_on_a_gpu(monkeypatch, tiny):
    assert tokens_while_decoding(monkeypatch, tiny) == 2048
    assert tokens_while_decoding(monkeypatch, tiny, max_num_seqs=1024) == 4096
    assert tokens_while_decoding(monkeypatch, tiny, max_num_batched_tokens=16384) is None
    assert tokens_while_decoding(monkeypatch, tiny, ranks=2) is None


def test_the_loop_is_built_with_it_until_a_user_sets_a_number(tiny):
    engine = Engine(tiny("llama"), page_size=16, max_num_seqs=4)
    session = engine._session
    session.settings = replace(session.settings, max_tokens_while_decoding=2048)
    engine.generate([[5, 6]])
    assert engine._loop.costs.max_tokens_while_decoding == 2048
    engine.max_num_batched_tokens = 64
    assert engine._loop.costs.max_tokens_while_decoding is None
    engine.release()
    engine.generate([[5, 6]])
    assert engine._loop.costs.max_tokens_while_decoding is None
