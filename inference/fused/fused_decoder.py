"""`FusedDecoder`: decoder layers as fused kernels, in CUDA graphs and in steps too large for one.

    ids ─▶ embed ─▶ residual ─▶ add, norm ─▶ GEMM ─▶ attention ─▶ GEMM ─┐
                       ▲                     q, k, v              output │
                       └── GEMM ◀── gated GEMM ◀── add, norm ◀───────────┘
                           down     gate, up

Steps with prompts take the same way; their products are the library's, attention has one more
kernel, and the last layer computes only the tokens that get logits. It is used for steps inside
CUDA graphs and for those too large for one, for model families whose layers are known to be norm,
attention with rotary positions, norm, gated MLP; and not where a module it bypasses has a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ...attention import Pages, Varlen, attend_cached
from ...attention.backends import CallSpec, select_backend
from ...attention.hf import current_varlen, record_call
from ...kernels import (
    MAX_FUSED_SEQS,
    QKTransform,
    add_rms_norm_split_k,
    embed,
    fused_decode_attention,
    fused_decode_tiles,
    gemm_tiles,
    split_k_gemm,
    supports_pdl,
    write_qkv,
)
from ...runtime import global_of, rms_norm_eps, stock_class
from ..execution.capture import is_capturing
from ..execution.graph_shape import MIXED_TOKENS
from ..live_model.patches import Patches
from .gated_products import gated_linear, is_silu, is_watched
from .kept_tokens import KeptTokens
from .replacements import ROTARY_FUNCTION, is_neox_rotary
from .stacked_weights import StackedWeights

_ATTENTION_CHILDREN = {"q_proj", "k_proj", "v_proj", "o_proj"}
_QK_NORMS = {"q_norm", "k_norm"}
_FAMILIES = {"Llama", "Mistral", "Qwen2", "Qwen3"}
"""Other families have modules of the same names that compute something else: layers without rotary,
scaled residuals, scores that change at long distances. Comparing a few logits would not show it."""
_FIXED_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose angles depend on the position alone."""


class FusedDecoder:
    """The decoder layers of one model, for captured and for very large steps."""

    __name__ = "captured steps"

    def __init__(self, stacked: StackedWeights):
        self._stacked = stacked
        self._supported = False
        self._pending: tuple[Tensor, Tensor] | None = None
        """A residual and the partial sums that the next norm adds to it."""
        self._rope_tables: list[tuple[Tensor, Tensor]] = []
        """Cosines and sines by position; shorter ones are kept, since graphs hold addresses."""
        self._split_counters: Tensor | None = None
        self._owner: nn.Module | None = None
        """The model whose layers are patched."""
        self._last_layer: nn.Module | None = None
        self._step: Varlen | None = None
        """What the model's forward was called with; the layers around it receive no keywords."""
        self._token_lengths: Tensor | None = None
        """int32 [T]: keys of each token's sequence up to itself, where sequences have several."""
        self._kept: KeptTokens | None = None
        """The tokens that the last layer computes; None: all."""

    def __call__(self, modules: Sequence[nn.Module], patches: Patches) -> None:
        """Patch every layer; the original forwards stay in use for all other steps."""
        check_supported(modules[0])
        body: Any = modules[0].model
        self._owner, self._last_layer = body, body.layers[-1]
        self._supported = _has_one_dtype(body) and _has_no_hooks(body)
        if _has_plain_head(modules[0], body):
            model: Any = modules[0]
            patches.set(model, "forward", partial(self._causal_lm, model.forward))
        for module, forward in (
            (body, self._body),
            (body.embed_tokens, self._embed),
            (body.rotary_emb, self._rotary),
            (body.norm, self._norm),
            *((layer, self._layer) for layer in body.layers),
        ):
            patches.set(module, "forward", partial(forward, module, module.forward))
        patches.on_restore(self._clear_pending)

    def _active_pages(self) -> Pages | None:
        """Return the pages of this step, if the fused layers compute it."""
        varlen = self._varlen()
        if not self._supported or varlen is None or varlen.pages is None:
            return None
        is_large = len(varlen.pages.kv_slots) > MIXED_TOKENS[-1]
        return varlen.pages if is_capturing() or is_large else None

    def _varlen(self) -> Varlen | None:
        return current_varlen(self._owner) if self._step is None else self._step

    def _causal_lm(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model; if the last layer computes few tokens, take the logits of all of them."""
        self._step, keep = kwargs.get("varlen"), kwargs.get("logits_to_keep", 0)
        if self._active_pages() is not None and (varlen := self._varlen()) is not None:
            self._kept = KeptTokens.of(keep, varlen)
        if self._kept is not None:
            kwargs["logits_to_keep"] = 0
        try:
            return original(*args, **kwargs)
        finally:
            self._step = self._kept = None

    def _body(self, body: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._step = kwargs.get("varlen")
        try:
            return original(*args, **kwargs)
        finally:
            self._step = None

    def _embed(self, module: Any, original: Callable[..., Tensor], ids: Tensor) -> Tensor:
        if self._active_pages() is None:
            return original(ids)
        return embed(ids[0], module.weight)[None]

    def _rotary(self, module: Any, original: Any, x: Tensor, position_ids: Tensor) -> Any:
        """Return the tables of all positions: the attention kernel looks up its own."""
        pages = self._active_pages()
        if pages is None:
            return original(x, position_ids)
        if not self._rope_tables or len(self._rope_tables[-1][0]) < pages.max_length:
            # A power of two: steps outside of graphs come in any length.
            num_positions = 1 << (pages.max_length - 1).bit_length()
            positions = torch.arange(num_positions, device=x.device)
            cos, sin = original(x, positions[None])
            self._rope_tables.append((cos[0].contiguous(), sin[0].contiguous()))
        varlen = self._varlen()
        assert varlen is not None
        if varlen.max_length == 1:  # a token is the last of its sequence
            self._token_lengths = pages.lengths
        else:
            self._token_lengths = (position_ids[0] + 1).to(torch.int32)
        return self._rope_tables[-1]

    def _layer(
        self, layer: Any, original: Any, hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        pages = self._active_pages()
        if pages is None:
            return original(hidden, *args, **kwargs)
        attn, mlp, use_pdl = layer.self_attn, layer.mlp, supports_pdl(hidden.device)
        residual, x = self._add_pending_residual(hidden, layer.input_layernorm)
        weight, bias = self._stacked.of(attn)
        transform = QKTransform(*self._rope_tables[-1], bias, *_qk_norm_weights(attn))
        kept = self._kept if layer is self._last_layer else None
        attn_out = self._attend(attn, linear_split_k(x, weight), transform, use_pdl, kept)
        if kept is not None:
            residual = residual[kept.indices]
        partials = add_linear(residual, attn_out.flatten(1), attn.o_proj.weight)
        norm = layer.post_attention_layernorm
        residual, x = add_rms_norm_split_k(residual, partials, norm.weight, _eps(norm), use_pdl)
        partials = add_linear(
            residual,
            gated_linear(x, mlp.gate_proj.weight, mlp.up_proj.weight),
            mlp.down_proj.weight,
        )
        residual = residual[None]
        self._pending = residual, partials
        return residual

    def _attend(
        self,
        attn: Any,
        partials: Tensor,
        transform: QKTransform,
        use_pdl: bool,
        kept: KeptTokens | None,
    ) -> Tensor:
        varlen = self._varlen()
        assert varlen is not None and varlen.pages is not None
        pages, layer, num_rows = varlen.pages, attn.layer_idx, partials.shape[1]
        keys, values, *scales = pages.cache.layer(layer)
        kv_heads, dim = keys.shape[2:]
        record_call(layer, "call", (kv_heads, dim, values.shape[3]))
        heads = attn.q_proj.out_features // dim
        cache = keys, values
        tiles = None
        if varlen.max_length == 1 and not scales and _by_own_kernels(keys, heads):
            tiles = fused_decode_tiles(keys, heads, num_rows, pages.max_length)
        if tiles is None:
            token_lengths = self._token_lengths
            assert token_lengths is not None
            q = write_qkv(
                partials, transform, *cache, token_lengths, pages.kv_slots, heads, use_pdl, scales
            )
            if kept is not None:
                q, varlen = q[kept.indices], kept.varlen(varlen, token_lengths)
            return attend_cached(q, varlen, layer=layer, scale=attn.scaling)
        if self._split_counters is None:
            shape = MAX_FUSED_SEQS, kv_heads
            self._split_counters = torch.zeros(shape, dtype=torch.int32, device=partials.device)
        paging = pages.table, pages.lengths, pages.kv_slots
        return fused_decode_attention(
            partials, transform, *cache, *paging, heads, attn.scaling, tiles,
            self._split_counters, use_pdl,
        )  # fmt: skip

    def _norm(self, norm: Any, original: Any, hidden: Tensor) -> Tensor:
        if self._pending is None or self._pending[0] is not hidden:
            return original(hidden)
        return self._add_pending_residual(hidden, norm)[1][None]

    def _add_pending_residual(self, hidden: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """Return the residual with its pending partial sums, and its norm; both [M, H]."""
        x = hidden[0]
        pending, self._pending = self._pending, None
        partials = x.new_empty(0, *x.shape)
        if pending is not None and pending[0] is hidden:
            partials = pending[1]
        return add_rms_norm_split_k(x, partials, norm.weight, _eps(norm), supports_pdl(x.device))

    def _clear_pending(self) -> None:
        self._pending = self._token_lengths = self._kept = None


def linear_split_k(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [M, K] times weight [N, K] as partial sums [S, M, N]."""
    tiles = gemm_tiles(len(x), weight) if x.is_cuda else None
    if tiles is None:
        return F.linear(x, weight)[None]
    return split_k_gemm(x, weight, tiles, supports_pdl(x.device))


def add_linear(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the partial sums of x [M, K] times weight [N, K] that are still to be added.

    The library adds its product to `residual` at once, in place, and leaves none.
    """
    tiles = gemm_tiles(len(x), weight) if x.is_cuda else None
    if tiles is not None:
        return split_k_gemm(x, weight, tiles, supports_pdl(x.device))
    residual.addmm_(x, weight.t())
    return x.new_empty(0, *residual.shape)


def check_supported(model: Any) -> None:
    """Raise AssertionError unless `FusedDecoder` computes what this model's layers compute."""
    body: Any = getattr(model, "model", None)
    assert isinstance(getattr(body, "layers", None), nn.ModuleList), "no plain stack of layers"
    for layer in body.layers:
        check_supported_layer(layer)
    assert body.rotary_emb.rope_type in _FIXED_ROPE_TYPES, "angles that depend on the length"
    assert type(body.embed_tokens) is nn.Embedding, "no plain embedding"
    assert rms_norm_eps(body.norm) is not None, "another last norm"


def check_supported_layer(layer: Any) -> None:
    """Raise AssertionError unless `FusedDecoder` computes what this layer computes."""
    attn: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    family = type(layer).__name__.removesuffix("DecoderLayer")
    assert family in _FAMILIES, f"layers of {family}"
    for module, suffix in ((layer, "DecoderLayer"), (attn, "Attention"), (mlp, "MLP")):
        cls = type(module)
        is_stock = cls.__name__ == family + suffix and cls.__module__.startswith("transformers.")
        assert is_stock, f"a class of its own, {cls.__module__}.{cls.__name__}"
    names = {name for name, _ in attn.named_children()}
    supported = (_ATTENTION_CHILDREN, _ATTENTION_CHILDREN | _QK_NORMS)
    assert names in supported, f"attention of {sorted(names)}"
    assert is_silu(mlp.act_fn), "another activation"
    linears = [attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    assert all(type(x) is nn.Linear and x.bias is None for x in linears), "no plain linear layers"
    # Mistral's attention reads its configuration; the others have a window per layer.
    windowed = attn.config if family == "Mistral" else attn
    assert getattr(windowed, "sliding_window", None) is None, "a sliding window"
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attn, name) for name in names & _QK_NORMS]
    assert all(rms_norm_eps(norm) is not None for norm in norms), "another norm"
    stock = global_of(stock_class(attn).forward, ROTARY_FUNCTION)
    assert stock is not None and is_neox_rotary(stock), "another rotary formula"


def _has_plain_head(model: Any, body: Any) -> bool:
    """Whether a model is a stock causal LM, which reads only the tokens it computes logits of."""
    cls, family = type(model), type(body).__name__.removesuffix("Model")
    return cls.__name__ == f"{family}ForCausalLM" and cls.__module__.startswith("transformers.")


def _has_one_dtype(body: nn.Module) -> bool:
    """Whether all weights have one half-precision dtype: fp32 products are left to the library.

    On a CPU, where only tests capture, kernels are interpreted in any dtype.
    """
    dtypes = {(p.dtype, p.is_cuda) for p in body.parameters()}
    if not any(is_cuda for _, is_cuda in dtypes):
        return True
    return len(dtypes) == 1 and dtypes <= {(torch.bfloat16, True), (torch.float16, True)}


def _has_no_hooks(body: nn.Module) -> bool:
    """Whether no module has someone else's hook or forward, which would be bypassed."""
    return not any(map(is_watched, body.modules())) and not _has_any_global_hook()


def _by_own_kernels(keys: Tensor, heads: int) -> bool:
    """Whether our own kernels are selected for such pages; a user may force another backend."""
    if not keys.is_cuda:
        return True
    _, page_size, kv_heads, dim = keys.shape
    spec = CallSpec(
        device="cuda", dtype=keys.dtype, heads=heads, kv_heads=kv_heads, key_dim=dim,
        value_dim=dim, grad=False, window=False, softcap=False, sinks=False,
        page_size=page_size, decode=True,
    )  # fmt: skip
    return select_backend(spec) == "triton"


def _qk_norm_weights(attn: Any) -> tuple[Any, Any, float]:
    if not hasattr(attn, "q_norm"):
        return None, None, 0.0
    return attn.q_norm.weight, attn.k_norm.weight, _eps(attn.q_norm)


def _eps(norm: Any) -> float:
    return rms_norm_eps(norm) or 0.0
