"""Decode steps the short way: a plain decoder layer in seven kernels, each close behind the last.

    ids ─▶ embed ─▶ residual ─▶ settle ─▶ product ─▶ attend ─▶ product ─┐
                       ▲         norm      q, k, v               output   │
                       └── product ◀── gated ◀── settle ◀─────────────────┘
                             down      gate, up   norm

It is taken inside graphs only, by families whose layers are known to be plain (norm, attention with
rotary positions, norm, gated MLP), and not where a module it passes over carries someone's hook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention import Pages, Varlen, attend_cached
from ...attention.backends import CallSpec, select
from ...attention.hf import current_varlen, record_call
from ...kernels.decode_attention import QKTransform, attention_tiles, fused_decode_attention, place
from ...kernels.paged_decode import supports_pdl
from ...kernels.settling import settle
from ...kernels.skinny import gated, gated_tiles, product, product_tiles
from ...kernels.tokens import embed
from ..execution.capture import is_capturing, run_on_streams
from ..live_model.patches import Patches
from .qkv_weights import QKVWeights

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_FAMILIES = {"Llama", "Mistral", "Qwen2", "Qwen3"}
"""Others share the names of their modules but not what they compute: layers without rotation,
scaled residuals, scores that change far into a text. A few logits compared would not show it."""
_FEW = 16
"""Sequences up to which attention in one kernel is the faster one, as an H200 has it."""
_FIXED_ANGLES = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose angles depend on the position alone."""


class FusedDecoder:
    """Plain layers of one model, for steps in which every sequence runs one token."""

    __name__ = "decode steps"

    def __init__(self, stacked: QKVWeights):
        self._stacked = stacked
        self._fits = False
        self._owed: tuple[Tensor, Tensor] | None = None
        """A residual on its way to the next norm, and the parts that are to be added to it."""
        self._angles: list[tuple[Tensor, Tensor]] = []
        """Cosines and sines by position; graphs hold addresses, so shorter ones stay."""
        self._ended: Tensor | None = None
        self._step: Varlen | None = None
        """What the model's forward was called with; the layers around it receive no keywords."""

    def __call__(self, modules: Sequence[nn.Module], places: Patches, stale: bool) -> None:
        """Offer the short way to every layer; the longer one stays for all other steps."""
        body: Any = getattr(modules[0], "model", None)
        assert body.rotary_emb.rope_type in _FIXED_ANGLES, "angles that depend on the length"
        assert type(body.embed_tokens) is nn.Embedding, "no plain embedding"
        for layer in body.layers:
            assert_plain(layer)
        self._fits = _one_dtype(body) and _untouched(body) and _proven(body)
        for owner, way in (
            (body, self._body),
            (body.embed_tokens, self._embed),
            (body.rotary_emb, self._rotary),
            (body.norm, self._norm),
            *((layer, self._layer) for layer in body.layers),
        ):
            places.set(owner, "forward", partial(way, owner, owner.forward))
        places.on_restore(self._forget)

    def _taken(self) -> Pages | None:
        """The pages of this step, if it goes the short way."""
        varlen = self._varlen()
        if not self._fits or not is_capturing() or varlen is None or varlen.max_length != 1:
            return None
        return varlen.pages

    def _varlen(self) -> Varlen | None:
        return current_varlen() if self._step is None else self._step

    def _body(self, body: Any, longer: Any, *args: Any, **options: Any) -> Any:
        self._step = options.get("varlen")
        try:
            return longer(*args, **options)
        finally:
            self._step = None

    def _embed(self, module: Any, longer: Callable[..., Tensor], ids: Tensor) -> Tensor:
        return longer(ids) if self._taken() is None else embed(ids[0], module.weight)[None]

    def _rotary(self, module: Any, longer: Any, x: Tensor, position_ids: Tensor) -> Any:
        """The angles of all positions: whoever needs them finds its own."""
        pages = self._taken()
        if pages is None:
            return longer(x, position_ids)
        if not self._angles or len(self._angles[-1][0]) < pages.max_length:
            every = torch.arange(pages.max_length, device=x.device)
            cos, sin = longer(x, every[None])
            self._angles.append((cos[0].contiguous(), sin[0].contiguous()))
        return self._angles[-1]

    def _layer(self, layer: Any, longer: Any, hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        pages = self._taken()
        if pages is None:
            return longer(hidden, *args, **options)
        attn, mlp, late = layer.self_attn, layer.mlp, supports_pdl(hidden.device)
        residual, x = self._settle(hidden, layer.input_layernorm)
        weight, bias = self._stacked.weights(attn)
        turn = QKTransform(*self._angles[-1], bias, *_gains(attn))
        a = self._attend(attn, multiply(x, weight), turn, late)
        parts = multiply(a.flatten(1), attn.o_proj.weight)
        norm = layer.post_attention_layernorm
        residual, x = settle(residual, parts, norm.weight, _eps(norm), late)
        parts = multiply(multiply_gated(x, mlp), mlp.down_proj.weight)
        residual = residual[None]
        self._owed = residual, parts
        return residual

    def _attend(self, attn: Any, parts: Tensor, turn: QKTransform, late: bool) -> Tensor:
        varlen = self._varlen()
        assert varlen is not None and varlen.pages is not None
        pages, layer, rows = varlen.pages, attn.layer_idx, parts.shape[1]
        keys, values = pages.cache.layer(layer)
        kv, dim = keys.shape[2:]
        record_call(layer, "call", (kv, dim, values.shape[3]))
        heads = attn.q_proj.out_features // dim
        if rows > _FEW or not _by_own_kernels(keys, heads):
            q = place(parts, turn, pages, layer, heads, late)
            return attend_cached(q, varlen, layer=layer, scale=attn.scaling)
        if self._ended is None:
            self._ended = torch.zeros(_FEW, kv, dtype=torch.int32, device=parts.device)
        tiles, ended = attention_tiles(keys, rows, pages.max_length), self._ended
        return fused_decode_attention(
            parts, turn, pages, layer, heads, attn.scaling, tiles, ended, late
        )

    def _norm(self, norm: Any, longer: Any, hidden: Tensor) -> Tensor:
        if self._owed is None or self._owed[0] is not hidden:
            return longer(hidden)
        return self._settle(hidden, norm)[1][None]

    def _settle(self, hidden: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """The residual with what is owed to it, and its norm; [M, H] both."""
        flat = hidden[0]
        owed, self._owed = self._owed, None
        nothing = flat.new_empty(0, *flat.shape)
        parts = owed[1] if owed is not None and owed[0] is hidden else nothing
        return settle(flat, parts, norm.weight, _eps(norm), supports_pdl(flat.device))

    def _forget(self) -> None:
        self._owed = None


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K], as parts [S, M, N] that are still to be added up."""
    tiles = product_tiles(len(x), *weight.shape) if x.is_cuda else None
    if tiles is None:
        return F.linear(x, weight)[None]
    return product(x, weight, tiles, supports_pdl(x.device))


def multiply_gated(x: Tensor, mlp: Any) -> Tensor:
    """SiLU of the gate's product, times the other branch's."""
    from ...kernels.elementwise import silu_mul

    gate, up = mlp.gate_proj, mlp.up_proj
    tiles = gated_tiles(len(x), *gate.weight.shape) if x.is_cuda else None
    if tiles is None:
        return silu_mul(*run_on_streams(x, gate, up))
    return gated(x, gate.weight, up.weight, tiles, supports_pdl(x.device))


def assert_plain(layer: Any) -> None:
    """Raise unless a layer is one that the short way computes."""
    attn, mlp = layer.self_attn, layer.mlp
    family = type(layer).__name__.removesuffix("DecoderLayer")
    assert family in _FAMILIES, f"layers of {family}"
    for part, name in ((layer, "DecoderLayer"), (attn, "Attention"), (mlp, "MLP")):
        kind = type(part)
        assert kind.__name__ == family + name and kind.__module__.startswith("transformers.")
    names = {name for name, _ in attn.named_children()}
    assert names in (_ATTENTION, _ATTENTION | _NORMS), f"attention of {sorted(names)}"
    assert type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation"), "another activation"
    linears = [attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    assert all(type(x) is nn.Linear and x.bias is None for x in linears), "no plain products"
    # Mistral's attention looks into its configuration; others know each layer's own window.
    windowed = attn.config if family == "Mistral" else attn
    assert getattr(windowed, "sliding_window", None) is None, "a sliding window"


def _one_dtype(body: nn.Module) -> bool:
    """Whether all weights are of one narrow dtype: products of float32 are the library's.

    On a CPU, where nothing is captured but in tests, kernels are interpreted in any dtype.
    """
    kinds = {(p.dtype, p.is_cuda) for p in body.parameters()}
    if not any(cuda for _, cuda in kinds):
        return True
    return len(kinds) == 1 and kinds <= {(torch.bfloat16, True), (torch.float16, True)}


def _untouched(body: nn.Module) -> bool:
    """Whether no module carries someone's hook or forward, which would be passed over."""
    for module in body.modules():
        own = vars(module).get("forward")
        if module._forward_hooks or module._forward_pre_hooks:
            return False
        if own is not None and not hasattr(own, "_nopad_patch"):
            return False
    return True


def _proven(body: Any) -> bool:
    """Whether norms and rotations are those our kernels were found to compute."""
    parts = [body.norm.forward]
    for layer in body.layers:
        source = sys.modules[type(layer.self_attn).__module__]
        parts += [layer.input_layernorm.forward, getattr(source, "apply_rotary_pos_emb", None)]
    return all(hasattr(part, "_nopad_patch") for part in parts)


def _by_own_kernels(keys: Tensor, heads: int) -> bool:
    """Whether our own attention kernels serve such pages; another may be asked for by name."""
    if not keys.is_cuda:
        return True
    _, page, kv, dim = keys.shape
    ask = CallSpec(
        device="cuda", dtype=keys.dtype, heads=heads, kv_heads=kv, key_dim=dim, value_dim=dim,
        grad=False, window=False, softcap=False, sinks=False, page_size=page, decode=True,
    )  # fmt: skip
    return select(ask) == "triton"


def _gains(attn: Any) -> tuple[Any, Any, float]:
    if not hasattr(attn, "q_norm"):
        return None, None, 0.0
    return attn.q_norm.weight, attn.k_norm.weight, _eps(attn.q_norm)


def _eps(norm: Any) -> float:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
