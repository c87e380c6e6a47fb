"""Engine settings: validated, with defaults for the model and its device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any, get_args

import torch
from torch import nn

from ..attention.hf import SequenceLimit, sequence_limit, stateful_parts
from .execution.memory_budget import Memory, check_memory
from .live_model.replica import replica_ranks
from .scheduling.speculation import DraftSource

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, None: None}
MAX_SETTING = 2**31 - 1
"""Lengths and counts are kept in 32 bits."""
_TOKENS_WHILE_DECODING = 2048
"""Default on a GPU. While requests decode, steps of 16,384 tokens are no faster (on an H200, 1B
shape: 3 % slower with long prompts, equal with short ones) and delay their tokens by 50 ms."""
_TOKENS_PER_SEQ = 4
"""With many requests, steps need capacity for prompts beside one token of each request."""
_POSITION_TABLE = re.compile(r"(^|\.)(wpe|\w*position\w*)(\.base_layer)?$")
"""Names of learned position tables; adapters wrap the layer that they adapt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `Engine`, with their defaults."""

    memory: Memory
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_tokens_while_decoding: int | None
    """Maximum tokens of a captured step while requests decode; None: `max_num_batched_tokens`."""
    max_model_len: int
    max_model_len_reason: str
    """Why the model allows no longer sequences although it has the positions."""
    max_waiting: int | None
    target_itl: float | None
    keep_memory: bool
    dtype: torch.dtype | None
    cuda_graphs: bool
    speculate: DraftSource | None
    quantized: torch.dtype | None
    """The 8-bit dtype of keys and values in the cache."""
    debug: bool


def resolve_settings(
    model: Any,
    *,
    memory: Memory,
    page_size: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    max_model_len: int | None,
    max_waiting: int | None,
    target_itl: float | None,
    keep_memory: bool,
    dtype: torch.dtype | None,
    cuda_graphs: bool,
    speculate: DraftSource | None,
    kv_dtype: str | None,
    debug: bool,
) -> Settings:
    """Validate settings; None becomes the default for the model and its device."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    limit = sequence_limit(model.config.get_text_config())
    longest = _max_model_len(model, limit, max_model_len)
    num_seqs = check_positive("max_num_seqs", max_num_seqs, 512 if on_gpu else 64)
    return Settings(
        memory=check_memory(memory),
        page_size=_page_size(page_size, 256 if on_gpu else 16),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=check_positive(
            "max_num_batched_tokens", max_num_batched_tokens, 16384 if on_gpu else 2048
        ),
        max_tokens_while_decoding=(
            _tokens_while_decoding(model, num_seqs)
            if on_gpu and max_num_batched_tokens is None
            else None
        ),
        max_model_len=longest,
        max_model_len_reason="" if limit is None or longest < limit.length else limit.reason,
        max_waiting=None if max_waiting is None else check_positive("max_waiting", max_waiting),
        target_itl=_target_itl(model, target_itl),
        keep_memory=check_flag("keep_memory", keep_memory),
        dtype=check_dtype(dtype),
        cuda_graphs=check_flag("cuda_graphs", cuda_graphs),
        speculate=_speculate(model, speculate),
        quantized=_quantized(model, kv_dtype),
        debug=check_flag("debug", debug),
    )


def check_model(model: Any) -> Any:
    """Return a model of Transformers; raise for anything else."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ValueError(
            f"{name} is not a causal LM: pass a model of Transformers, as "
            "AutoModelForCausalLM.from_pretrained returns it"
        )
    return model


def check_positive(name: str, value: int | None, default: int | None = None) -> int:
    """Return an integer >= 1, or the default for None."""
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer >= 1")
    if value > MAX_SETTING:
        raise ValueError(f"{name} is {value}; it must be at most {MAX_SETTING}")
    return int(value)


def check_flag(name: str, value: bool) -> bool:
    """Return a flag that is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; pass True or False")
    return value


def check_seed(seed: int) -> int:
    """Return a seed that is a whole number."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(f"seed is {seed!r}; it must be a whole number")
    return int(seed)


def check_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return a dtype that models compute in, or None."""
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; pass one such as torch.bfloat16, or None")
    return dtype


def _target_itl(model: Any, seconds: float | None) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < seconds < inf:
        raise ValueError(f"target_itl is {seconds!r}; pass seconds above 0, or None")
    if len(replica_ranks(model)) > 1:
        raise ValueError(
            "target_itl= cannot be used with tensor parallelism: its ranks would measure different "
            "times and cut prompts differently; lower max_num_batched_tokens instead"
        )
    return float(seconds)


def _speculate(model: Any, source: DraftSource | None) -> DraftSource | None:
    if source is None:
        return None
    if source not in get_args(DraftSource):
        raise ValueError(f"speculate is {source!r}; pass 'ngram', 'history' or None")
    if len(replica_ranks(model)) > 1:
        raise ValueError(
            "speculate= cannot be used with tensor parallelism: whether drafts pay is measured, "
            "and its ranks would decide differently; omit it"
        )
    if stateful_parts(model):
        raise ValueError(
            f"speculate= cannot be used with {type(model).__name__}: rejected tokens would change "
            "the states of its layers; omit it"
        )
    return source


def _quantized(model: Any, kv_dtype: str | None) -> torch.dtype | None:
    if kv_dtype not in [*_KV_DTYPES]:
        raise ValueError(
            f"kv_dtype is {kv_dtype!r}; pass 'int8', 'fp8', or None for the dtype that the model "
            "computes in"
        )
    device = next(model.parameters()).device
    if kv_dtype == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise ValueError(
                f"kv_dtype='fp8' needs a GPU of compute capability 8.9, this one has "
                f"{capability[0]}.{capability[1]}: pass 'int8'"
            )
    return _KV_DTYPES[kv_dtype]


def _tokens_while_decoding(model: Any, max_num_seqs: int) -> int | None:
    # Whether steps are captured, and hence cut, could differ between the ranks of one model.
    if len(replica_ranks(model)) > 1:
        return None
    return max(_TOKENS_WHILE_DECODING, _TOKENS_PER_SEQ * max_num_seqs)


def _page_size(value: int | None, default: int) -> int:
    size = check_positive("page_size", value, default)
    if size % 16:
        raise ValueError(f"page_size is {size}; it must be a multiple of 16")
    return size


def _max_model_len(model: Any, limit: SequenceLimit | None, value: int | None) -> int:
    longest = _max_positions(model)
    if limit is not None:
        longest = min(longest, limit.length)
    length = check_positive("max_model_len", value, longest)
    if limit is not None and length > limit.length + 1:
        raise ValueError(
            f"max_model_len is {length}; this model allows {limit.length}, because {limit.reason}: "
            f"use at most {limit.length} (the harness calls it max_length)"
        )
    num_positions = min(_position_tables(model), default=length)
    if length > num_positions + 1:  # the last token of a sequence is never run
        raise ValueError(
            f"max_model_len is {length}; the model has {num_positions} positions: use no more"
        )
    return length


def _max_positions(model: Any) -> int:
    """The longest sequence that the model's config names."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 8192


def _position_tables(model: nn.Module) -> list[int]:
    """Sizes of the learned position tables; rotary and ALiBi models have none."""
    return [
        module.num_embeddings - getattr(module, "offset", 0)
        for name, module in _text_modules(model)
        if isinstance(module, nn.Embedding) and _POSITION_TABLE.search(name)
    ]


def _text_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that process text, with their names, without those for vision and audio.

    Parts of a model for other inputs have their own config.
    """
    text_types = {type(model.config), type(model.config.get_text_config())}
    foreign: list[str] = []
    for name, module in model.named_modules():
        config = vars(module).get("config")
        if config is not None and type(config) not in text_types:
            foreign.append(f"{name}.")
        if not any(f"{name}.".startswith(prefix) for prefix in foreign):
            yield name, module
