"""Translate lm_eval's gen_kwargs and the model's generation_config to `SamplingParams`.

    task: {until, max_gen_toks, do_sample ...} ─┐
                                                ├─▶ SamplingParams
    model.generation_config ────────────────────┘

lm_eval's own `hf` model calls `generate`, which takes settings that the task does not give from the
model's generation_config. Doing the same here gives the same answers. A setting that the engine
does not support is refused by name, in the task as in the generation_config.
"""

from __future__ import annotations

from typing import Any

from ..requests.generation_config import check_generation_config

_SUPPORTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_DEFAULT_TOP_K = 50
"""`generate` samples from the top 50 if neither the task nor the model gives a top_k."""


def to_sampling_kwargs(gen_kwargs: dict[str, Any], generation_config: Any) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` for a task's generation settings.

    gen_kwargs: settings of the task, without stop strings and token limit.
    generation_config: the model's, or None.

    >>> to_sampling_kwargs({"do_sample": False, "temperature": 0.0}, None)
    {'temperature': 0.0}
    >>> to_sampling_kwargs({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, None)
    {'top_k': 50, 'temperature': 0.7, 'top_p': 0.9}
    """
    gen_kwargs = {"temperature": 0.0, **gen_kwargs}
    gen_kwargs.pop("do_sample", None)
    if (beams := gen_kwargs.pop("num_beams", 1)) != 1:
        raise ValueError(f"num_beams is {beams}: beam search is not supported; set it to 1")
    unknown = set(gen_kwargs) - set(_SUPPORTED)
    if unknown:
        raise ValueError(
            f"generation setting {sorted(unknown)[0]!r} is not supported; supported are "
            f"{', '.join(_SUPPORTED)}"
        )
    is_sampled = gen_kwargs["temperature"] != 0
    check_generation_config(generation_config, is_sampled)
    defaults = {"top_k": _DEFAULT_TOP_K} if is_sampled else {}
    for name in _SUPPORTED if is_sampled else ("repetition_penalty",):
        if (value := getattr(generation_config, name, None)) is not None:
            defaults[name] = value
    return {**defaults, **gen_kwargs}
