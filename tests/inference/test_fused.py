"""The fused kernels, interpreted on a CPU, against the modules they stand in for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from nopad.inference.fused_kernels import rms_norm, rotary, silu_mul
from transformers.models.llama import modeling_llama as llama

torch.manual_seed(0)
for width in (16, 96, 300):
    norm = llama.LlamaRMSNorm(width, eps=1e-5)
    norm.weight.data.normal_()
    wide = torch.randn(1, 7, 5 * width)[..., : 3 * width].view(1, 7, 3, width)
    for x in (torch.randn(1, 7, width), wide, wide.transpose(1, 2)):
        torch.testing.assert_close(rms_norm(x, norm.weight.data, 1e-5), norm(x).detach())
gate, up = torch.randn(1, 5, 300), torch.randn(1, 5, 300)
torch.testing.assert_close(silu_mul(gate, up), torch.nn.functional.silu(gate) * up)
for heads, kv, width in ((4, 2, 32), (6, 3, 24), (1, 1, 128)):
    q = torch.randn(1, 5, heads, width).transpose(1, 2)
    k = torch.randn(1, 5, kv, width).transpose(1, 2)
    angles = torch.randn(1, 5, width)
    got = rotary(q, k, angles.cos(), angles.sin())
    want = llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    torch.testing.assert_close(got, want)

from nopad.inference.borrow import borrowed
from nopad.inference.fused import _logits, fused, provable_parts
from transformers import AutoConfig, AutoModelForCausalLM

small = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=None)
counts = {}
for family in ("llama", "qwen3", "gemma2", "olmo2", "gpt_neox"):
    config = AutoConfig.for_model(family, **small)
    model = AutoModelForCausalLM.from_config(config).train()
    before = [dict(m.__dict__) for m in model.modules()]
    parts = provable_parts(model)
    counts[family] = len(parts)
    with borrowed(model):
        want = _logits(model, torch.device("cpu"))
        with fused(list(model.modules()), parts):
            got = _logits(model, torch.device("cpu"))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert [dict(m.__dict__) for m in model.modules()] == before, "a module was left changed"
assert counts["llama"] == counts["qwen3"] == 5, counts
print("finished")
"""


def test_fused_kernels_compute_what_the_modules_compute():
    pytest.importorskip("triton", reason="the kernels are Triton's")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path.home(),
    )
    assert run.returncode == 0 and "finished" in run.stdout, run.stderr[-2000:]
