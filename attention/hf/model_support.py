"""Whether a model is supported, and the KV shapes and states of its layers; by short probe runs."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import MODEL_FOR_MASKED_LM_MAPPING

from ..varlen import Varlen
from .call_log import CallLog, attention_layers, recording
from .forward_context import forward_context
from .leak_check import as_leaf, embeddings_replaced, token_gradients
from .model_types import (
    KEEPS_STATE,
    NO_INTERFACE,
    NO_POSITIONS,
    SELECTS_KEYS,
    config_reason,
    configured_state,
    has_interface,
)
from .module_modes import eval_mode, nopad_attention
from .sequence_limits import frozen_rotary
from .state_pool import StatefulModule, probe_states, silent_states

_STATEFUL_MODULES = (
    "Mamba", "GatedDelta", "DeltaNet", "ShortConv", "Recurrent", "LinearAttention",
    "LightningAttention", "KimiDelta", "Rwkv", "xLSTM", "mLSTM", "CCA",
)  # fmt: skip
_SPARSE_MODULES = ("Indexer",)

_PROBE_TOKENS = 8

_drops_kwargs: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Keyed by model, not stored on it: an evaluation must not modify the live model."""


_observed_reasons: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
"""The same, for what a probe finds against a model."""


def unsupported_reason(model: Any, *, states: bool = False) -> str | None:
    """Return why a model cannot run with attn_implementation="nopad"; None if it can.

    What the config and the modules do not show, two forwards of a few tokens do, once per model.

    states: accept recurrent and convolutional states that a `StatePool` can hold.
    """
    return _declared_reason(model, states) or _observed_reason(model)


def not_causal_lm_reason(model: Any) -> str | None:
    """Return why a model of Transformers is not a causal LM; None if it is one, or may be."""
    name, config = type(model).__name__, model.config.get_text_config()
    if model.get_output_embeddings() is None:
        return f"{name} has no LM head, which predicts the next token at every position"
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder"
    if is_encoder(config):
        return f"{name} is an encoder, whose tokens see those after them (is_decoder=False)"
    return None


def is_encoder(config: Any) -> bool:
    """Return whether the tokens of a text model see those after them, as in BERT."""
    is_decoder = any(getattr(config, flag, False) for flag in ("is_decoder", "causal"))
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not is_decoder


def _declared_reason(model: Any, states: bool) -> str | None:
    config = model.config
    if (reason := not_causal_lm_reason(model)) is not None:
        return reason
    model_type = config.model_type
    if (reason := config_reason(config)) is not None:
        return reason
    state = configured_state(config.get_text_config()) or declared_state(model)
    if state is not None and not states:
        return f"{model_type} " + KEEPS_STATE.format(state)
    if state is None or attention_layers(model):
        if not _uses_interface(model):
            return f"{model_type} {NO_INTERFACE}"
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return f"{model_type} {NO_POSITIONS}"
    for module in model.modules():
        name = type(module).__name__
        if any(word in name for word in _SPARSE_MODULES):
            return f"{model_type} {SELECTS_KEYS} ({name})"
    return None


def declared_state(model: nn.Module) -> str | None:
    """Return the module that keeps a recurrent or convolutional state, by its name or parts."""
    for module in model.modules():
        name = type(module).__name__
        if any(word in name for word in _STATEFUL_MODULES):
            return name
        if hasattr(module, "layer_idx") and any(map(_spans_tokens, module.children())):
            return f"the convolution of {name}"
    return None


def _spans_tokens(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1


def check_supported(model: Any, *, states: bool = False) -> None:
    """Raise with the reason if a model is not supported; `states` as in `unsupported_reason`."""
    reason = unsupported_reason(model, states=states)
    if reason is not None:
        raise ValueError(f"nopad cannot run this model: {reason}")


def layer_shapes(model: Any) -> list[tuple[int, int, int]]:
    """Return (Hkv, Dk, Dv) of every layer, as the attention function sees them for one token.

    Layers of a hybrid that do not attend have (0, 0, 0).
    """
    calls = _probe(model).calls
    shapes = {layer: shape for layer, _, shape in calls}
    count = max(shapes, default=-1) + 1
    may_skip = declared_state(model) is not None
    has_gaps = len(shapes) < count and not may_skip
    if len(shapes) != len(calls) or min(shapes, default=0) < 0 or has_gaps:
        check_supported(model, states=True)
        layers = sorted(layer for layer, _, _ in calls)
        raise ValueError(f"{type(model).__name__}: attention was called for layers {layers}")
    return [shapes.get(layer, (0, 0, 0)) for layer in range(count)]


def stateful_parts(model: Any) -> dict[nn.Module, StatefulModule]:
    """Return the modules of a hybrid whose state a `StatePool` holds; none for other models."""
    return _probe_states(model)[0]


def drops_kwargs(model: Any) -> bool:
    """Return whether a model does not pass keyword arguments on to the attention function.

    Probed once per model, also by `layer_shapes`.
    """
    if model not in _drops_kwargs:
        _probe(model)
    return _drops_kwargs[model]


def step_context(model: Any, varlen: Varlen) -> AbstractContextManager[None]:
    """Return a `forward_context` for a model that drops keyword arguments, else a null context."""
    return forward_context(varlen, model) if drops_kwargs(model) else nullcontext()


def _probe_states(model: Any) -> tuple[dict[nn.Module, StatefulModule], list[str]]:
    """Return these modules, and the names of those that lose their state between two chunks."""
    if declared_state(model) is None:
        return {}, []
    return probe_states(lambda count: _forward_as_nopad(model, _probe_ids(model, count)), model)


def _observed_reason(model: Any) -> str | None:
    """Return what a probe finds against a model; what cannot be probed is not supported."""
    model_type = model.config.model_type
    try:
        if model not in _observed_reasons:
            _observed_reasons[model] = _examine(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model may fail in any way
        line = (str(error).strip().splitlines() or [""])[0]
        return f"{model_type} cannot be examined ({type(error).__name__}: {line})"
    reason = _observed_reasons[model]
    return None if reason is None else f"{model_type} {reason}"


def _examine(model: Any) -> str | None:
    states, faulty = _probe_states(model)
    if faulty:
        return f"computes the second chunk of a prompt differently than in one piece ({faulty[0]})"
    with silent_states(states):
        if not keeps_state(model):
            return None
    return "carries a state from token to token beside attention and its cache"


def keeps_state(model: Any) -> bool:
    """Return whether tokens reach later ones by other ways than attention.

    While attention returns zeros, a token depends on itself alone, unless a layer keeps a state.
    """
    ids = _probe_ids(model, 2 * _PROBE_TOKENS)
    first, second = ids.view(2, -1)
    with recording(silent=True), torch.no_grad():
        before, after = (
            _forward_as_nopad(model, torch.cat([start, second])) for start in (first, second)
        )
    moved = (before - after)[_PROBE_TOKENS:].abs().max() / before.abs().max()
    if not moved:
        return False
    # Other tokens also change how experts group theirs, so rounding: a gradient is exact.
    try:
        with recording(silent=True), torch.inference_mode(False):
            return _gradient_reaches_back(model, ids.clone())  # not one of inference mode
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # some quantized weights have no backward
        return bool(moved > 2e-2)


def _probe_ids(model: Any, count: int) -> torch.Tensor:
    return torch.arange(3, 3 + count) % model.config.get_text_config().vocab_size


def _gradient_reaches_back(model: Any, ids: torch.Tensor) -> bool:
    with embeddings_replaced(model, as_leaf) as embedded, torch.enable_grad():
        logits = _forward_as_nopad(model, ids)
    by_token = token_gradients(logits, embedded, torch.arange(len(ids)) >= _PROBE_TOKENS)
    return bool((by_token[:_PROBE_TOKENS] > 0).any())  # NaN is not a path


def _probe(model: Any) -> CallLog:
    """Run one dummy token, record the calls, and remember whether its keyword reached them."""
    with recording() as log, torch.no_grad():
        _forward_as_nopad(model, torch.zeros(1, dtype=torch.int64))
    _drops_kwargs[model] = any(source != "call" for _, source, _ in log.calls)
    return log


def _forward_as_nopad(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [T, V] of one sequence, and leave no trace."""
    device, count, modules = next(model.parameters()).device, len(ids), list(model.modules())
    varlen = Varlen(torch.tensor([0, count], dtype=torch.int32, device=device), count)
    with (
        eval_mode(model),
        nopad_attention(modules),
        frozen_rotary(modules),
        torch.compiler.set_stance("force_eager"),  # compiled graphs record nothing
    ):
        output = model(
            input_ids=ids[None].to(device),
            position_ids=torch.arange(count, device=device)[None],
            use_cache=False,
            varlen=varlen,
        )
    return output.logits[0]


def _uses_interface(model: nn.Module) -> bool:
    return has_interface({type(module) for module in model.modules()})
