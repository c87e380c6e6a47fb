"""Choose, verify and apply fused replacements of a model's operations while the engine has it.

    hand-fused   layers of known families
    compiled     layers of any other model, with products of our own where they fit

Nothing is assumed about a model beyond what its modules look like, so every replacement is
verified: the model runs with and without it, and one that changes the logits is not used.
Afterwards the modules are as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...attention import PagedCache, Pages, Varlen, forward_context, step_context
from ...attention.hf import StatePool
from ..execution.capture import capture_mode
from ..execution.graph_shape import MIXED_TOKENS, capture_sizes
from ..execution.sampler import SamplingInputs, sample
from ..live_model.borrow import borrow_model
from ..live_model.patches import Patches
from .compiled_layers import CompiledLayers
from .gated_products import gated_products
from .replacements import gated_mlps, norms, residual_adds, rotary
from .stacked_weights import StackedWeights
from .state_kernels import StateKernels

log = logging.getLogger("nopad.inference")

_enabled: ContextVar[bool] = ContextVar("nopad_fused_ops", default=True)


@contextmanager
def without_fused_ops() -> Iterator[None]:
    """Build engines inside without fused kernels."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def fused_ops_enabled() -> bool:
    """Whether engines that are built now have fused kernels."""
    return _enabled.get()


class FusedOp(Protocol):
    """A kind of replacement; a call puts it on a model's modules, of which the model is the first.

    If it copies weights, `patches.refresh()` has to copy them again.
    """

    __name__: str

    def __call__(self, modules: Sequence[nn.Module], patches: Patches, /) -> None: ...


@dataclass(frozen=True, slots=True)
class _Tier:
    """Replacements in the order in which they are verified, each together with those before it."""

    name: str
    ops: tuple[FusedOp, ...]
    layers: FusedOp
    """The one that computes the layers; without it, the next tier is tried."""


def verified_ops(
    model: Any,
    cache_like: PagedCache,
    max_num_seqs: int = 0,
    states_like: StatePool | None = None,
) -> list[FusedOp]:
    """Return the replacements that, together, leave the logits of a model unchanged.

    Args:
        cache_like: a cache of the kind that steps will use.
        max_num_seqs: the most sequences of a step; kernels for up to as many are compiled here.
        states_like: states of the kind that the model keeps; replacements are for decode steps.
    """
    if not fused_ops_enabled():
        return []
    tiers = _tiers(model, states_like)
    kind, verified = "stock layers", list[FusedOp]()
    compilation: AbstractContextManager[None] = nullcontext()
    if states_like is None:
        compilation = _background_compilation(model, tiers[0].ops, cache_like, max_num_seqs)
    with borrow_model(model), compilation:
        expected = _trial_logits(model, cache_like, states_like)
        for tier in tiers:
            verified = []
            for op in tier.ops:
                if _matches_model(model, [*verified, op], expected, cache_like, states_like):
                    verified.append(op)
            if tier.layers in verified:
                kind = tier.name
                break
    names = ", ".join(op.__name__ for op in verified) or "none fit this model"
    log.info("fused kernels: %s: %s", kind, names)
    return verified


def _tiers(model: Any, states_like: StatePool | None) -> list[_Tier]:
    """Return the tiers to try, the preferred one first."""
    stacked = StackedWeights()
    if states_like is not None:
        compiled = CompiledLayers(states_like.modules)
        parts = StateKernels(states_like), stacked, gated_products, compiled
        return [_Tier("compiled layers with states", parts, compiled)]
    compiled = CompiledLayers()
    parts = stacked, gated_products, compiled
    from .fused_decoder import FusedDecoder, check_supported  # needs Triton

    by_hand = norms, gated_mlps, rotary, stacked, residual_adds
    stock = _Tier("stock layers", by_hand, residual_adds)
    try:
        check_supported(model)
    except (AssertionError, AttributeError) as error:
        return [_Tier(f"compiled layers ({error})", parts, compiled), stock]
    decoder = FusedDecoder(stacked)
    fused = _Tier("hand-fused layers", (*by_hand, decoder), decoder)
    return [fused, _Tier("compiled layers", parts, compiled), stock]


class FusedOps:
    """Verified replacements of one model, applied at every call of the engine."""

    def __init__(self, ops: list[FusedOp]):
        self._ops = ops
        self._patches: Patches | None = None
        """Those of the last call, which fit until the weights change."""

    def drop_patches(self) -> None:
        """Build the patches again at the next call: the weights changed."""
        self._patches = None

    @contextmanager
    def active(self, modules: Sequence[nn.Module], refresh: bool = True) -> Iterator[None]:
        """Apply the replacements inside; the model is the first of its modules.

        refresh: copy weights again that patches of an earlier call have copies of.
        """
        patches = self._patches  # a call inside, from a progress callback, may replace it
        if patches is None or not patches.reapply():
            self._patches = None
            with apply_ops(modules, self._ops) as self._patches:
                yield
            return
        try:
            if refresh:
                patches.refresh()
            yield
        finally:
            patches.restore()


@contextmanager
def apply_ops(modules: Sequence[nn.Module], ops: Sequence[FusedOp]) -> Iterator[Patches]:
    """Build the patches of each replacement and keep them in place inside."""
    patches = Patches()
    try:
        for op in ops:
            op(modules, patches)
        yield patches
    finally:
        patches.restore()


@contextmanager
def _background_compilation(
    model: Any, ops: Sequence[FusedOp], cache_like: PagedCache, max_num_seqs: int
) -> Iterator[None]:
    """On a GPU, compile the kernels of all steps; a verification inside waits for its own."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        yield
        return
    from .precompile import compile_in_background, record_missing  # needs Triton

    modules = list(model.modules())
    with apply_ops(modules, ()) as patches, record_missing() as missing:
        for op in ops:
            if isinstance(op, CompiledLayers):
                continue  # torch compiles while it verifies them
            with suppress(Exception):  # verification reports it
                op(modules, patches)
        with suppress(Exception):
            _trial_logits(model, cache_like)
            # Another architecture may fail here: its kernels compile at first use.
            for shape in _kernel_shapes(max_num_seqs):
                _precompile_step(model, cache_like, *shape)
    with compile_in_background(missing, device):
        yield


def _kernel_shapes(max_num_seqs: int) -> Iterator[tuple[int, int, int, bool]]:
    """Yield steps that together launch every kernel: sequences, pages, tokens, captured or not.

    Tiles of products change up to MAX_GEMM_ROWS tokens, everything else at powers of two.
    """
    from ...kernels import MAX_GEMM_ROWS

    num_powers = max(2 * max_num_seqs - 1, 0).bit_length()  # the last holds all sequences
    powers = {1 << power for power in range(num_powers)}
    for size in sorted(powers):
        yield size, 4, size, False
        yield size, 8, max(2048, size), True
        for num_pages in (4, 16, 64):
            yield size, num_pages, size, True
    for size in capture_sizes(max_num_seqs):
        if size not in powers and size <= MAX_GEMM_ROWS:
            yield size, 4, size, True
    for num_tokens in MIXED_TOKENS:
        if num_tokens <= MAX_GEMM_ROWS:
            yield 1, 8, num_tokens, True


def _precompile_step(
    model: Any,
    cache_like: PagedCache,
    num_seqs: int,
    num_pages: int,
    num_tokens: int,
    captured: bool,
) -> None:
    """Run a decode step if it is captured and has a token per sequence, else one with prompts.

    All layers launch the same kernels, so only the first one runs.
    """
    body, device = model.model, model.device
    cache = _small_cache(cache_like, cache_like.quantized)
    max_queries = 1 if captured and num_tokens == num_seqs else 2
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    cu_seqlens = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    table = torch.zeros(num_seqs, num_pages, dtype=torch.int32, device=device)
    max_length = num_pages * cache.page_size
    pages = Pages(cache, table, cu_seqlens[:-1] * 0 + 1, ids[0] - 1, max_length)
    varlen = Varlen(cu_seqlens, max_queries, pages)
    with forward_context(varlen, model), capture_mode(captured):
        x = body.embed_tokens(ids)
        kwargs = {"position_embeddings": body.rotary_emb(x, ids), "varlen": varlen}
        x = body.layers[0](x, attention_mask=None, **kwargs)
        x = body.norm(x if isinstance(x, Tensor) else x[0])
        logits = x.new_empty(1, model.config.vocab_size).expand(num_seqs, -1)
        sample(logits, SamplingInputs())
        if captured:
            _launch_graph_kernels(logits)


def _launch_graph_kernels(logits: Tensor) -> None:
    """Launch the kernels around the model in a captured step: of its inputs and its tokens."""
    from ...kernels import argmax_into, copy_words, fill_last_tokens

    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    copy_words(tokens, torch.empty_like(tokens))
    fill_last_tokens(tokens, tokens)
    argmax_into(logits, tokens, torch.empty_like(tokens), tokens[:1] - 1, tokens[None])


def _matches_model(
    model: Any,
    ops: list[FusedOp],
    expected: Tensor,
    cache_like: PagedCache,
    states_like: StatePool | None = None,
) -> bool:
    """Whether the logits with `ops` are the expected ones; an op that fails does not match."""
    try:
        with apply_ops(list(model.modules()), ops):
            logits = _trial_logits(model, cache_like, states_like)
    except Exception as error:
        name = ops[-1].__name__
        log.info("fused %s: not for this model (%s: %s)", name, type(error).__name__, error)
        return False
    limit = 1e-4 if expected.dtype == torch.float32 else 4e-2
    error = (logits.float() - expected.float()).norm() / expected.float().norm()
    return bool(error < limit)


def _trial_logits(
    model: Any, cache_like: PagedCache, states_like: StatePool | None = None
) -> Tensor:
    """Return the logits of two short prompts, then of a mixed and of a decode step, as captured."""
    # In 8 bits a last bit of a key can become a step of 6 %, in either computation.
    cache = _small_cache(cache_like, None)
    states = None if states_like is None else states_like.blank(2)
    logits = [_run_step(model, cache, [range(5), range(3)], None, states)]
    with capture_mode():
        logits.append(_run_step(model, cache, [range(5, 6), range(3, 7)], [0, 4], states))
        logits.append(_run_step(model, cache, [range(6, 7), range(7, 8)], None, states))
    return torch.cat(logits, dim=1)


def _small_cache(cache_like: PagedCache, quantized: torch.dtype | None) -> PagedCache:
    """Return a cache of two pages, with these 8-bit keys and values or with those of its dtype."""
    kind = cache_like.layer_shapes, cache_like.dtype, cache_like.device, quantized
    return PagedCache(2, cache_like.page_size, *kind)


def _run_step(
    model: Any,
    cache: PagedCache,
    spans: list[range],
    keep: list[int] | None = None,
    states: StatePool | None = None,
) -> Tensor:
    """Return the logits of the positions in `spans`, or of those to keep; sequence n has page n."""

    def on_device(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=cache.device)

    positions = on_device([p for span in spans for p in span])
    slots = on_device([n * cache.page_size + p for n, span in enumerate(spans) for p in span])
    cu_seqlens = on_device([0, *accumulate(map(len, spans))], torch.int32)
    lengths = on_device([span.stop for span in spans], torch.int32)
    table = on_device(list(range(len(spans))), torch.int32)[:, None]
    max_length = max(span.stop for span in spans)
    pages = Pages(cache, table, lengths, slots, max_length)
    varlen = Varlen(cu_seqlens, max(map(len, spans)), pages)
    ids = (positions * 7 + 3) % model.config.get_text_config().vocab_size
    kept: AbstractContextManager[None] = nullcontext()
    if states is not None:
        starts, counts = [span.start for span in spans], list(map(len, spans))
        rows = range(len(spans))
        decodes = max(counts) == 1
        kept = states.decode(on_device([*rows])) if decodes else states.step(rows, starts, counts)
    with step_context(model, varlen), kept:
        out = model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if keep is None else on_device(keep),
            varlen=varlen,
        )
    return out.logits
