"""How a text of a harness task is continued: by what the task asks for, and the model's defaults.

    task: {until, max_gen_toks, do_sample ...} ─┐
                                                ├─▶ SamplingParams
    model.generation_config ────────────────────┘

lm_eval's own `hf` model calls `generate`, which takes what the task does not say from the model's
generation_config: so the answers are the same only if that is done here, too. A setting that the
engine does not do is refused by name, wherever it stands.
"""

from __future__ import annotations

from typing import Any

_KNOBS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TOP_K = 50
"""What `generate` draws from where neither the task nor the model says it."""
_ALWAYS = {
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "stop_strings": None,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
}
_DRAWING = {"top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
"""Settings that change what comes out, always or where tokens are drawn, and what is none."""


def settle(wishes: dict[str, Any], defaults: Any) -> dict[str, Any]:
    """Name the settings of `SamplingParams` that continue a prompt as it is wished.

    wishes: settings of the task, beyond where to stop and how many tokens.
    defaults: the model's generation_config, or None.

    >>> settle({"do_sample": False, "temperature": 0.0}, None)
    {'temperature': 0.0}
    >>> settle({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, None)
    {'top_k': 50, 'temperature': 0.7, 'top_p': 0.9}
    """
    wishes = {"temperature": 0.0, **wishes}
    wishes.pop("do_sample", None)
    if (beams := wishes.pop("num_beams", 1)) != 1:
        raise ValueError(f"num_beams is {beams}: there is no beam search; set it to 1")
    unknown = set(wishes) - set(_KNOBS)
    if unknown:
        raise ValueError(f"generation setting {sorted(unknown)[0]!r}: there are {_KNOBS}")
    drawing = wishes["temperature"] != 0
    check_defaults(defaults, drawing)
    own = {"top_k": _TOP_K} if drawing else {}
    for name in _KNOBS if drawing else ("repetition_penalty",):
        if (value := getattr(defaults, name, None)) is not None:
            own[name] = value
    return {**own, **wishes}


def check_defaults(defaults: Any, drawing: bool = False) -> None:
    """Refuse a generation_config with settings that the engine does not do."""
    for name, none in {**_ALWAYS, **(_DRAWING if drawing else {})}.items():
        value = getattr(defaults, name, None)
        if value is not None and value != none and value != []:
            raise ValueError(
                f"the model's generation_config sets {name} to {value!r}, which the engine does "
                f"not do: take it out, model.generation_config.{name} = None, or of its file"
            )
