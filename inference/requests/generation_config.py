"""Refuse settings of a model's generation_config that the engine does not support, by name.

`generate` of Transformers would apply them, so ignoring them would silently change the texts.
Settings with a counterpart in `SamplingParams` (temperature, top_p, repetition_penalty, …) are not
read: there, `SamplingParams` decides, as in vLLM.
"""

from __future__ import annotations

from typing import Any

_UNSUPPORTED = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "stop_strings": None,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "sequence_bias": None,
    "token_healing": False,
    "guidance_scale": 1.0,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
}
"""Settings that change the output, each with the value that has no effect."""
_UNSUPPORTED_SAMPLING = {
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""The same for settings that only matter when tokens are sampled."""
_INSTEAD = {
    "min_length": "SamplingParams(min_tokens=...)",
    "min_new_tokens": "SamplingParams(min_tokens=...)",
    "max_time": "deadline=",
    "stop_strings": "SamplingParams(stop=...)",
}


def check_generation_config(generation_config: Any, is_sampled: bool = False) -> None:
    """Raise ValueError for a generation_config with settings that the engine does not support."""
    for name, neutral in (_UNSUPPORTED | (_UNSUPPORTED_SAMPLING if is_sampled else {})).items():
        value = getattr(generation_config, name, None)
        if value is not None and value != neutral and value not in ([], (), {}):
            instead = f", and pass {_INSTEAD[name]} instead" if name in _INSTEAD else ""
            raise ValueError(
                f"the model's generation_config sets {name} to {value!r}, which the engine does "
                f"not support: set model.generation_config.{name} = None, or remove it from "
                f"generation_config.json{instead}"
            )
