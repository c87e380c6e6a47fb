"""Fused kernels in place of a model's small operations, while the engine has the model.

Nothing is known about a model but what its modules look like, so every replacement is proven: the
model runs once with and once without it, and what does not agree is not used. On leaving, the
modules are as they were.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...attention import PagedCache, Pages, Varlen, forward_context, step_context
from ..execution.capture import capture_mode, run_on_streams
from ..execution.sampler import SamplingInputs, sample
from ..live_model.borrow import borrow_model
from ..live_model.patches import Patches
from .qkv_weights import QKVWeights

log = logging.getLogger("nopad.inference")


Modules = Sequence[nn.Module]
_enabled: ContextVar[bool] = ContextVar("nopad_fused_ops", default=True)


@contextmanager
def without_fused_ops() -> Iterator[None]:
    """Give engines that are built inside no fused kernels."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


class FusedOp(Protocol):
    """A kind of replacement, put in place on a model's modules.

    `stale`: the weights may have changed since it was last in place.
    """

    __name__: str

    def __call__(self, modules: Modules, places: Patches, stale: bool, /) -> None: ...


def verified_ops(model: Any, like: PagedCache, most: int = 0) -> list[FusedOp]:
    """The replacements that, together, leave this model's logits as they are.

    Args:
        like: a cache of the kind the steps will use.
        most: sequences a step will have at most; the kernels for as many are compiled here.
    """
    if not _enabled.get():
        return []
    proven: list[FusedOp] = []
    stacked = QKVWeights()
    parts = (_norms, _gates, _rotaries, stacked, _residuals, _short_way(stacked))
    with borrow_model(model):
        if next(model.parameters()).is_cuda:
            _rehearse(model, parts, like, most)
        want = _logits(model, like)
        for part in parts:
            if _agrees(model, [*proven, part], want, like):
                proven.append(part)
    names = [part.__name__.strip("_") for part in proven]
    log.info("fused kernels: %s", ", ".join(names) or "none fit this model")
    return proven


def _short_way(stacked: QKVWeights) -> FusedOp:
    from .fused_decoder import FusedDecoder  # needs Triton

    return FusedDecoder(stacked)


class FusedOps:
    """Proven parts, put in place again and again."""

    def __init__(self, parts: list[FusedOp]):
        self._parts = parts
        self._places: Patches | None = None

    @contextmanager
    def active(self, modules: Modules, stale: bool = True) -> Iterator[None]:
        """Let fused kernels stand in for the model's own operations; it is the first module."""
        if stale or self._places is None or not self._places.reapply():
            self._places = None
            with fused(modules, self._parts, stale) as self._places:
                yield
            return
        try:
            yield
        finally:
            self._places.restore()


@contextmanager
def fused(modules: Modules, parts: Sequence[FusedOp], stale: bool = True) -> Iterator[Patches]:
    """Let parts stand in for the model's own operations, newly put in place."""
    places = Patches()
    try:
        for part in parts:
            part(modules, places, stale)
        yield places
    finally:
        places.restore()


def _rehearse(model: Any, parts: Sequence[FusedOp], like: PagedCache, most: int) -> None:
    """Have the kernels compiled that steps up to a size need, as far as the parts can be put in.

    How a launch is cut changes at powers of two only.
    """
    from .precompile import precompile_kernels  # needs Triton

    modules = list(model.modules())
    with fused(modules, ()) as places:
        for part in parts:
            with suppress(Exception):  # the proof will tell
                part(modules, places, True)
        with suppress(Exception), precompile_kernels(next(model.parameters()).device):
            _logits(model, like)
            with suppress(Exception):  # a model built otherwise: its kernels wait for their steps
                for power in range(most.bit_length()):
                    _rehearse_step(model, like, 1 << power)


def _rehearse_step(model: Any, like: PagedCache, size: int) -> None:
    """Go through a step that mixes prompts and decodes, and through decode steps as in graphs.

    All layers launch the same, so the first one speaks for them.
    """
    body, cache = model.model, _small(like)
    ids = torch.zeros(1, size, dtype=torch.int64, device=model.device)
    bounds = torch.arange(size + 1, dtype=torch.int32, device=model.device)
    for width, longest in ((4, 2), (4, 1), (16, 1)):
        table = torch.zeros(size, width, dtype=torch.int32, device=model.device)
        pages = Pages(cache, table, bounds[:-1] * 0 + 1, ids[0] - 1, width * cache.page_size)
        varlen = Varlen(bounds, longest, pages)
        with forward_context(varlen), capture_mode(longest == 1):
            x = body.embed_tokens(ids)
            more = {"position_embeddings": body.rotary_emb(x, ids), "varlen": varlen}
            x = body.layers[0](x, attention_mask=None, **more)
            x = body.norm(x if isinstance(x, Tensor) else x[0])
            sample(x.new_empty(1, model.config.vocab_size).expand(size, -1), SamplingInputs())


def _agrees(model: Any, parts: list[FusedOp], want: Tensor, like: PagedCache) -> bool:
    try:
        with fused(list(model.modules()), parts):
            got = _logits(model, like)
    except Exception as error:  # whatever a foreign module makes of it, the part is not for it
        name = parts[-1].__name__.strip("_")
        log.info("fused %s: not for this model (%s: %s)", name, type(error).__name__, error)
        return False
    tight = 1e-4 if want.dtype == torch.float32 else 4e-2
    wrong = (got.float() - want.float()).norm() / want.float().norm()
    return bool(wrong < tight)


def _logits(model: Any, like: PagedCache) -> Tensor:
    """Logits of two short sequences, then of one token more of each, as graphs compute it."""
    cache = _small(like)
    prompts = _step(model, cache, [range(5), range(3)])
    with capture_mode():
        return torch.cat([prompts, _step(model, cache, [range(5, 6), range(3, 4)])], dim=1)


def _small(like: PagedCache) -> PagedCache:
    """Two pages of the same kind."""
    keys = like.layer(0)[0]
    return PagedCache(2, like.page_size, like.layer_shapes, keys.dtype, keys.device)


def _step(model: Any, cache: PagedCache, spans: list[range]) -> Tensor:
    """Logits of positions `spans`; sequence n has page n."""

    def on_device(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=cache.layer(0)[0].device)

    positions = on_device([p for span in spans for p in span])
    slots = on_device([n * cache.page_size + p for n, span in enumerate(spans) for p in span])
    bounds = on_device([0, *accumulate(map(len, spans))], torch.int32)
    lengths = on_device([span.stop for span in spans], torch.int32)
    table = on_device(list(range(len(spans))), torch.int32)[:, None]
    longest = max(span.stop for span in spans)
    varlen = Varlen(bounds, max(map(len, spans)), Pages(cache, table, lengths, slots, longest))
    ids = (positions * 7 + 3) % model.config.get_text_config().vocab_size
    with step_context(model, varlen):
        out = model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, varlen=varlen
        )
    return out.logits


def _norms(modules: Modules, places: Patches, stale: bool) -> None:
    from ...kernels.elementwise import rms_norm

    for module in modules:
        eps = _rms_eps(module)
        if eps is not None:

            def forward(x: Tensor, m: Any = module, eps: float = eps) -> Tensor:
                return rms_norm(x, m.weight, eps)

            places.set(module, "forward", forward)


def _rms_eps(module: Any) -> float | None:
    if not type(module).__name__.endswith("RMSNorm") or getattr(module, "weight", None) is None:
        return None
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _gates(modules: Modules, places: Patches, stale: bool) -> None:
    from ...kernels.elementwise import silu_mul

    for module in modules:
        if not {"gate_proj", "up_proj", "down_proj", "act_fn"} <= module._modules.keys():
            continue

        def forward(x: Tensor, m: Any = module) -> Tensor:
            gate, up = run_on_streams(x, m.gate_proj, m.up_proj)
            return m.down_proj(silu_mul(gate, up))

        places.set(module, "forward", forward)


def _residuals(modules: Modules, places: Patches, stale: bool) -> None:
    """Add to the residual stream inside the next norm, not in a pass of its own.

    A layer hands on the residual and leaves what is to be added to it with `owed`; whoever norms
    that very tensor next adds it. The layers must be of the plain kind: norm, attention, norm, MLP.
    """
    from ...kernels.elementwise import add_rms_norm, rms_norm

    owed: dict[str, tuple[Tensor, Tensor]] = {}

    def settle(norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """The residual with what is owed to it, and its norm."""
        eps = _rms_eps(norm)
        assert eps is not None
        residual, delta = owed.pop("sum", (None, None))
        if delta is None or residual is not x:
            return x, rms_norm(x, norm.weight, eps)
        return add_rms_norm(x, delta, norm.weight, eps)

    def layer_forward(hidden_states: Tensor, *args: Any, layer: Any, **options: Any) -> Tensor:
        residual, x = settle(layer.input_layernorm, hidden_states)
        x = layer.self_attn(x, *args, **options)[0]
        owed["sum"] = (residual, x)
        residual, x = settle(layer.post_attention_layernorm, residual)
        owed["sum"] = (residual, layer.mlp(x))
        return residual

    body: Any = getattr(modules[0], "model", None)
    layers = getattr(body, "layers", None)
    assert layers is not None and _rms_eps(body.norm) is not None, "no plain stack of layers"
    for layer in layers:
        parts = {name for name, _ in layer.named_children()}
        assert parts == {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
        assert None not in (
            _rms_eps(layer.input_layernorm),
            _rms_eps(layer.post_attention_layernorm),
        )
        places.set(layer, "forward", partial(layer_forward, layer=layer))
    places.on_restore(owed.clear)
    places.set(body.norm, "forward", lambda x: settle(body.norm, x)[1])


def _rotaries(modules: Modules, places: Patches, stale: bool) -> None:
    from ...kernels.elementwise import rotary

    files = {type(module).__module__ for module in modules}
    for source in [sys.modules[name] for name in files]:
        own = getattr(source, "apply_rotary_pos_emb", None)
        if own is None:
            continue
        if not hasattr(own, "_nopad_patch"):
            assert _turns_halves(own), "another way to turn"

        def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1):
            assert unsqueeze_dim == 1 and q.shape[0] == 1 and cos.shape[-1] == q.shape[-1]
            return rotary(q, k, cos, sin)

        places.set(source, "apply_rotary_pos_emb", apply)


@lru_cache(maxsize=64)
def _turns_halves(own: Any) -> bool:
    """Whether a function turns by our kernel's rule: in a model's logits it may hardly show."""
    numbers = torch.arange(1, 145, dtype=torch.float32).sin()
    q, k = numbers[:96].view(1, 4, 3, 8), numbers[48:].view(1, 4, 3, 8)
    cos, sin = numbers[7:31].view(1, 3, 8), numbers[60:84].view(1, 3, 8)
    for x, turned in zip((q, k), own(q, k, cos, sin), strict=True):
        left, right = x.chunk(2, dim=-1)
        if not torch.allclose(turned, x * cos + torch.cat([-right, left], dim=-1) * sin, atol=1e-5):
            return False
    return True
