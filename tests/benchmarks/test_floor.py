"""The lower bound of a generation workload, beside numbers computed by hand for two tiny models."""

import sys
from pathlib import Path

import pytest
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from generation.floor import floor_seconds
from generation.workloads import Workload

INF = float("inf")
WORK = Workload([[1] * 3, [1] * 6], [3, 2])
"""After prefill: a step over 4 and 7 keys, and one over 5 keys."""
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}


def windowed():
    """One layer with a window of 4 keys and one without; in fp32."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES, num_hidden_layers=2, num_key_value_heads=1, intermediate_size=32,
            sliding_window=4, layer_types=["sliding_attention", "full_attention"],
        )
    )  # fmt: skip


def with_experts():
    """One layer; each token needs two of its four experts."""
    return MixtralForCausalLM(
        MixtralConfig(
            **SIZES, num_hidden_layers=1, num_key_value_heads=2, intermediate_size=8,
            num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bandwidth", "matrix_rate", "kv_bytes", "seconds"),
    [
        # Prefill: 2 x 5248 weights x 9 tokens, less 2 x 640 of the head x 7 tokens without logits,
        # and 64 x (27 + 24) pairs. Both steps take no time.
        (INF, INF, None, 0),
        # 5424 weights and 16 x (11 + 8) numbers of the cache; then 5424 and 16 x (5 + 4).
        (1, INF, None, 4 * (5424 + 304) + 4 * (5424 + 144)),
        (1, INF, 1.0, 4 * 5424 + 304 + 4 * 5424 + 144),
        # Prefill, 2 x 10496 + 64 x 19 and 10496 + 64 x 9 FLOPs.
        (INF, 1, None, 88768 + 22208 + 11072),
        # The first step computes longer than it reads, the second one reads longer.
        (2, 1, None, 88768 + 22208 + 2 * (5424 + 144)),
    ],
)
def test_keys_beyond_a_window_are_not_read(bandwidth, matrix_rate, kv_bytes, seconds):
    got = floor_seconds(windowed(), WORK, bandwidth, matrix_rate, kv_bytes)
    assert got == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("bandwidth", "matrix_rate", "seconds"),
    [
        # 1776 dense weights, 3/4 of 1536 for two tokens and 1/2 for one, 32 numbers per key.
        (1, INF, 4 * (1776 + 1152 + 32 * 11) + 4 * (1776 + 768 + 32 * 5)),
        # 2 x 2496 weights per token: two of four experts.
        (INF, 1, (9 * 4992 - 7 * 1280 + 64 * 27) + (2 * 4992 + 64 * 11) + (4992 + 64 * 5)),
    ],
)
def test_experts_that_no_token_is_routed_to_are_not_read(bandwidth, matrix_rate, seconds):
    got = floor_seconds(with_experts(), WORK, bandwidth, matrix_rate)
    assert got == pytest.approx(seconds, rel=1e-12)
