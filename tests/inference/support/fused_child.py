"""Run with TRITON_INTERPRET=1: models with fused operations against themselves without."""

from __future__ import annotations

import sys

import torch
from interpreted_casts import exact_casts
from nopad.attention import PagedCache, layer_shapes
from nopad.inference.execution import graph_shape
from nopad.inference.execution.capture import capture_mode
from nopad.inference.fused import apply_ops, fused_decoder, verified_ops
from nopad.inference.fused.fused_ops import _precompile_step, _run_step, _trial_logits
from nopad.inference.live_model.borrow import borrow_model
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": None,
}


def check_models(families: list[str]) -> None:
    counts = {}
    for family in families:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL)).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                scale = 1.6 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
                parameter.mul_("norm" in name).add_(torch.randn_like(parameter) * scale)
        cache_like = PagedCache(1, 16, layer_shapes(model), torch.float32, "cpu")
        before = [dict(m.__dict__) for m in model.modules()]
        ops = verified_ops(model, cache_like)
        counts[family] = len(ops)
        file = sys.modules[type(model).__module__]
        rotary = getattr(file, "apply_rotary_pos_emb", None)
        with borrow_model(model):
            expected = _trial_logits(model, cache_like)
            with apply_ops(list(model.modules()), ops):
                logits = _trial_logits(model, cache_like)
                assert len(ops) < 6 or ops[-1]._supported, family
                assert getattr(file, "apply_rotary_pos_emb", None) is rotary, "other models' too"
                if len(ops) == 6:
                    large = [(3, 8, 64, True)] if len(families) > 1 else []  # takes seconds
                    for shape in ((3, 4, 3, False), (3, 4, 3, True), *large):
                        _precompile_step(model, cache_like, *shape)
                    check_kept_tokens(model, ops[-1])
            if len(ops) == 6:
                check_quantized_pages(model, ops)
        assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert [dict(m.__dict__) for m in model.modules()] == before, "a module was left changed"
    plain = {"llama", "qwen3", "qwen2"}
    assert {counts[family] for family in plain & set(families)} == {6}, counts


def check_kept_tokens(model, decoder) -> None:
    """Compute the last layer of few tokens: in captured steps, and in those too large for that."""
    cache = PagedCache(3, 16, layer_shapes(model), torch.float32, "cpu")
    first, second = [range(7), range(2), range(4)], [range(7, 8), range(2, 9), range(4, 6)]
    keep = [0, 7, 9]  # the last token of each sequence
    _run_step(model, cache, first)
    expected = _run_step(model, cache, second)[:, keep]
    rows = []
    attend = decoder._attend
    decoder._attend = lambda *args: rows.append(attend(*args)) or rows[-1]
    with capture_mode():
        assert_close(_run_step(model, cache, second, keep), expected, atol=1e-4, rtol=1e-4)
    fused_decoder.MIXED_TOKENS = (8,)
    assert_close(_run_step(model, cache, second, keep), expected, atol=1e-4, rtol=1e-4)
    assert [len(each) for each in rows] == [10, 3] * 2, "of each layer"
    del decoder._attend
    fused_decoder.MIXED_TOKENS = graph_shape.MIXED_TOKENS


def check_quantized_pages(model, ops) -> None:
    """Prompts, a mixed step and a decode over pages in 8 bits, captured, against stock layers."""
    from triton.runtime import interpreter

    right = interpreter._convert_float
    interpreter._convert_float = exact_casts(right)
    shapes, spans = layer_shapes(model), [[range(5), range(3)], [range(5, 6), range(3, 7)]]
    for dtype in (torch.int8, torch.float8_e4m3fn):
        ours, theirs = (PagedCache(2, 16, shapes, torch.float32, "cpu", dtype) for _ in "ab")
        for step in (*spans, [range(6, 7), range(7, 8)]):
            expected = _run_step(model, theirs, step)
            with apply_ops(list(model.modules()), ops), capture_mode():
                got = _run_step(model, ours, step)
            assert_close(got, expected, atol=0.05, rtol=0.05)  # a rounding may go the other way
    interpreter._convert_float = right


if __name__ == "__main__":
    torch.manual_seed(0)
    check_models(sys.argv[1:])
    print("finished")
