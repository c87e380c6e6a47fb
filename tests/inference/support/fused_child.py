"""Run with TRITON_INTERPRET=1: every kernel of the engine against what it stands in for."""

from __future__ import annotations

import torch
from nopad.attention import PagedCache, Pages, Varlen, attend, layer_shapes
from nopad.inference.fused.fused_ops import _logits, _rehearse_step, fused, verified_ops
from nopad.inference.live_model.borrow import borrow_model
from nopad.kernels.decode_attention import QKTransform, fused_decode_attention, place
from nopad.kernels.elementwise import rms_norm, rotary, silu_mul
from nopad.kernels.paged_decode import DecodeTiles
from nopad.kernels.settling import settle
from nopad.kernels.skinny import Tiles, gated, product
from nopad.kernels.tokens import embed, likeliest, resolve
from torch.nn.functional import silu
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama as llama


def check_norm_gate_and_rotary() -> None:
    for width in (16, 96, 300):
        norm = llama.LlamaRMSNorm(width, eps=1e-5)
        norm.weight.data.normal_()
        wide = torch.randn(1, 7, 5 * width)[..., : 3 * width].view(1, 7, 3, width)
        for x in (torch.randn(1, 7, width), wide, wide.transpose(1, 2)):
            assert_close(rms_norm(x, norm.weight.data, 1e-5), norm(x).detach())
        x, parts = torch.randn(7, width), torch.randn(3, 7, width)
        total, normed = settle(x, parts, norm.weight.data, 1e-5, late=False)
        assert_close(total, x + parts.sum(0))
        assert_close(normed, norm(x + parts.sum(0)).detach())
    gate, up = torch.randn(1, 5, 300), torch.randn(1, 5, 300)
    assert_close(silu_mul(gate, up), silu(gate) * up)
    for heads, kv, width in ((4, 2, 32), (6, 3, 24), (1, 1, 128)):
        q = torch.randn(1, 5, heads, width).transpose(1, 2)
        k = torch.randn(1, 5, kv, width).transpose(1, 2)
        angles = torch.randn(1, 5, width)
        got = rotary(q, k, angles.cos(), angles.sin())
        assert_close(got, llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin()))


def check_products() -> None:
    left, right = torch.randn(200, 128) / 10, torch.randn(200, 128) / 10
    for rows in (5, 16, 40):
        x = torch.randn(rows, 128)
        for splits in (1, 2, 4):
            got = product(x, left, Tiles(16, 64, 32, splits), late=False)
            assert got.shape == (splits, rows, 200)
            assert_close(got.sum(0), x @ left.T, rtol=1e-4, atol=1e-4)
        got = gated(x, left, right, Tiles(16, 64, 32, 1), late=False)
        assert_close(got, silu(x @ left.T) * (x @ right.T), rtol=1e-4, atol=1e-4)


def check_tokens() -> None:
    for rows, vocabulary in ((2, 61), (3, 300)):
        x = torch.randn(rows, vocabulary).round(decimals=1)
        assert_close(likeliest(x), x.max(dim=-1).indices)
        x[1, 7], x[0] = float("nan"), float("-inf")
        assert likeliest(x)[:2].tolist() == [0, -1]
    newest = torch.arange(10) * 100
    assert resolve(torch.tensor([5, -1, -10, 7, -3]), newest).tolist() == [5, 0, 900, 7, 200]
    weight = torch.randn(20, 24)
    assert_close(embed(torch.tensor([3, 19, 0]), weight), weight[[3, 19, 0]])


def check_attention(heads: int, kv: int, dim: int, norm: bool, bias: bool) -> None:
    """From parts of projections to outputs and pages, beside the same in single operations."""
    lengths = [1, 17, 40, 33, 100]
    count, page, width = len(lengths), 16, 8
    table = torch.arange(count * width, dtype=torch.int32).view(count, width).flip(1).contiguous()
    slots = [int(table[i, (n - 1) // page]) * page + (n - 1) % page for i, n in enumerate(lengths)]
    caches = [PagedCache(count * width, page, [(kv, dim, dim)], torch.float32, "cpu") for _ in "ab"]
    for ours, theirs in zip(*(cache.layer(0) for cache in caches), strict=True):
        theirs.copy_(ours.normal_())
    slots[3] = -1  # a row that carries no request writes nothing
    of = [
        Pages(cache, table, torch.tensor(lengths, dtype=torch.int32), torch.tensor(slots), 128)
        for cache in caches
    ]
    parts = torch.randn(3, count, (heads + 2 * kv) * dim)
    angles = torch.randn(128, dim // 2).repeat(1, 2)
    shift = torch.randn(parts.shape[2]) if bias else None
    gains = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    projected = parts.sum(0) if shift is None else parts.sum(0) + shift
    q, k, v = projected.view(count, -1, dim).split([heads, kv, kv], dim=1)
    if norm:
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain
            for x, gain in zip((q, k), gains, strict=True)
        )
    at = torch.tensor(lengths) - 1
    cos, sin = angles.cos()[at], angles.sin()[at]
    q, k = (x[0].transpose(0, 1) for x in llama.apply_rotary_pos_emb(
        *(x.transpose(0, 1)[None] for x in (q, k)), cos[None], sin[None]
    ))  # fmt: skip
    bounds = torch.arange(count + 1, dtype=torch.int32)
    want = attend(q, k, v, Varlen(bounds, 1, of[1]), layer=0)
    turn = QKTransform(angles.cos(), angles.sin(), shift, *gains, 1e-6)
    assert_close(place(parts, turn, of[0], 0, heads, late=False), q, rtol=1e-4, atol=1e-5)
    for splits in (1, 2, 4):
        ended = torch.zeros(count, kv, dtype=torch.int32)
        tiles = DecodeTiles(32, splits, 4, 2)
        got = fused_decode_attention(
            parts, turn, of[0], 0, heads, dim**-0.5, tiles, ended, late=False
        )
        real = [0, 1, 2, 4]
        assert_close(got[real], want[real], rtol=1e-4, atol=1e-5)
        assert not ended.any()
    for ours, theirs in zip(*(cache.layer(0) for cache in caches), strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


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


def check_models() -> None:
    counts = {}
    for family in ("llama", "qwen3", "qwen2", "gemma2", "gpt_neox"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL)).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                scale = 1.6 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
                parameter.mul_("norm" in name).add_(torch.randn_like(parameter) * scale)
        like = PagedCache(1, 16, layer_shapes(model), torch.float32, "cpu")
        before = [dict(m.__dict__) for m in model.modules()]
        parts = verified_ops(model, like)
        counts[family] = len(parts)
        with borrow_model(model):
            want = _logits(model, like)
            with fused(list(model.modules()), parts):
                got = _logits(model, like)
                assert len(parts) < 6 or parts[-1]._fits, family
                if len(parts) == 6:
                    _rehearse_step(model, like, size=3)
        assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert [dict(m.__dict__) for m in model.modules()] == before, "a module was left changed"
    plain = [counts[family] for family in ("llama", "qwen3", "qwen2")]
    assert plain == [6] * 3, counts


if __name__ == "__main__":
    torch.manual_seed(0)
    check_norm_gate_and_rotary()
    check_products()
    check_tokens()
    check_attention(6, 2, 32, norm=False, bias=False)
    check_attention(4, 4, 16, norm=True, bias=True)
    check_attention(8, 2, 64, norm=True, bias=False)
    check_models()
    print("finished")
