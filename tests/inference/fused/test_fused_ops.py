"""Fused operations, interpreted on a CPU, against the modules they replace."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm_python

CHILD = Path(__file__).parents[1] / "support" / "fused_child.py"


@pytest.mark.parametrize(
    "families",
    [
        ["qwen3"],  # all that llama has, and norms of queries and keys
        pytest.param(["llama", "qwen2", "gemma2", "gpt_neox"], marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_fused_kernels_compute_what_the_modules_compute(families):
    pytest.importorskip("triton", reason="the kernels are Triton's")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = warm_python.run([CHILD, *families], env=environment, cwd=Path.home())
    assert run.returncode == 0 and "finished" in run.stdout, run.stderr[-2000:]


@pytest.mark.parametrize("family", ["smollm3", "granite", "gemma2", "llama", "mistral"])
def test_only_layers_known_to_be_plain_are_fused_whole(family):
    pytest.importorskip("triton", reason="the kernels are Triton's")
    from nopad.inference.fused.fused_decoder import check_supported_layer
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    layer = AutoModelForCausalLM.from_config(config).model.layers[0]
    if family == "llama":
        check_supported_layer(layer)
        layer.self_attn.o_proj = torch.nn.Sequential(layer.self_attn.o_proj)  # an adapter's wrap
    if family == "mistral":
        config.sliding_window = None
        check_supported_layer(layer)
        config.sliding_window = 7
    with pytest.raises(AssertionError):
        check_supported_layer(layer)


@pytest.mark.parametrize(
    ("dtypes", "cuda", "fits"),
    [
        ([torch.bfloat16] * 3, True, True),
        ([torch.bfloat16, torch.bfloat16, torch.float32], True, False),
        ([torch.float32] * 3, True, False),
        ([torch.float32] * 3, False, True),
    ],
)
def test_on_a_gpu_every_weight_must_be_of_one_narrow_dtype(dtypes, cuda, fits):
    pytest.importorskip("triton", reason="the kernels are Triton's")
    from nopad.inference.fused.fused_decoder import _has_one_dtype

    body: Any = SimpleNamespace(
        parameters=lambda: [SimpleNamespace(dtype=dtype, is_cuda=cuda) for dtype in dtypes]
    )
    assert _has_one_dtype(body) == fits


def test_whether_our_own_kernels_read_the_pages_is_asked_as_attention_asks(monkeypatch):
    pytest.importorskip("triton", reason="the kernels are Triton's")
    from nopad.inference.fused import fused_decoder

    specs = []
    monkeypatch.setattr(fused_decoder, "select_backend", lambda spec: specs.append(spec))
    keys: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(9, 256, 4, 64))
    assert not fused_decoder._by_own_kernels(keys, 12)
    (spec,) = specs
    assert (spec.device, spec.dtype, spec.page_size) == ("cuda", torch.bfloat16, 256)
    assert (spec.heads, spec.kv_heads, spec.key_dim) == (12, 4, 64)
    assert (spec.decode, spec.grad) == (True, False)


@pytest.mark.parametrize("max_num_seqs", [7, 100, 512])
def test_the_tiles_of_every_captured_step_are_compiled_before_the_first(max_num_seqs, monkeypatch):
    pytest.importorskip("triton", reason="the kernels are Triton's")
    from nopad.inference.execution import graph_shape
    from nopad.inference.fused.fused_ops import _kernel_shapes
    from nopad.kernels import gated_gemm_tiles, gemm_tiles

    monkeypatch.setattr("nopad.kernels.skinny_gemm.sm_count", lambda device: 132)
    weights = [torch.empty(rows, 2048, device="meta") for rows in (1024, 2048, 3072, 8192)]
    monkeypatch.setattr("nopad.kernels.skinny_gemm._is_aligned", lambda weight: True)

    def tiles(num_rows: int) -> set:
        """What is compiled: the kernel does not depend on the number of splits, if there are."""
        found = {("gated", gated_gemm_tiles(num_rows, w, w)) for w in weights}
        for one in (gemm_tiles(num_rows, w) for w in weights):
            blocks = None if one is None else (one.block_m, one.block_n, one.block_k)
            found.add((blocks, one is not None and (one.num_splits > 1, one.num_stages)))
        return found

    compiled = set().union(*(tiles(shape[2]) for shape in _kernel_shapes(max_num_seqs)))
    captured = {*graph_shape.capture_sizes(max_num_seqs), *graph_shape.MIXED_TOKENS}
    assert set().union(*map(tiles, captured)) <= compiled


@pytest.mark.parametrize("heads_and_dim", [(8, 64), (8, 128), (2, 64)])
@pytest.mark.parametrize("max_num_seqs", [1, 100, 300, 512])
def test_attention_of_every_captured_step_is_compiled_before_the_first(
    heads_and_dim, max_num_seqs, monkeypatch
):
    pytest.importorskip("triton", reason="the kernels are Triton's")
    from nopad.attention.backends.triton_paged import decode_tiles
    from nopad.inference.execution import graph_shape
    from nopad.inference.fused.fused_ops import _kernel_shapes
    from nopad.kernels import fused_decode_tiles
    from nopad.kernels.paged_decode import launch_blocks

    for module in ("fused_decode", "paged_decode"):
        monkeypatch.setattr(f"nopad.kernels.{module}.sm_count", lambda device: 132)
    keys = torch.empty(1, 256, *heads_and_dim, device="meta", dtype=torch.bfloat16)
    q = keys.new_empty(1, 4 * keys.shape[2], keys.shape[3])

    def kernels(num_seqs: int, num_pages: int, fused: bool = True) -> tuple:
        """One kernel is compiled for its tiles alone, the others for blocks of their launch."""
        tiles = fused_decode_tiles(keys, q.shape[1], num_seqs, num_pages * 256) if fused else None
        if tiles is not None:
            return "fused", tiles
        paged = decode_tiles(q, keys, keys, num_seqs, num_pages * 256)
        blocks = launch_blocks(num_seqs, paged.max_splits)
        return "paged", blocks, paged.block_n, paged.max_registers

    compiled = {
        kernels(num_seqs, num_pages, fused=num_seqs == num_tokens)
        for num_seqs, num_pages, num_tokens, captured in _kernel_shapes(max_num_seqs)
        if captured
    }
    widths = [4 << power for power in range(5)]  # longer contexts may wait for a compiler
    sizes = graph_shape.capture_sizes(max_num_seqs)
    needed = {kernels(size, n) for size in sizes for n in widths}
    with_prompts = {kernels(graph_shape.mixed_seqs(n), 8, fused=False) for n in sizes}
    assert needed | with_prompts <= compiled
    assert {kind for kind, *_ in needed | with_prompts} == {"fused", "paged"}, "both are taken"
