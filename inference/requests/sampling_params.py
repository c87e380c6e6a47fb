"""Sampling parameters of one request, under vLLM's names.

Nothing is clamped or guessed: an invalid value raises and names its parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Args:
        temperature: 0, or anything below 1e-5, takes the most likely token and needs no random
            numbers; below 1 favours likely tokens, above 1 unlikely ones.
        top_p: sample from the most likely tokens that together have this probability; 1: from all.
        top_k: sample from this many most likely tokens; 0 or -1: from all.
        min_p: drop tokens less likely than this fraction of the most likely token's probability.
        max_tokens: stop after this many new tokens.
        min_tokens: suppress end-of-text and stop tokens before this many new tokens.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, besides the model's end-of-text tokens.
        ignore_eos: continue after end-of-text tokens.
        seed: random numbers depend on (seed, prompt, position) alone; None: fresh ones in
            every call.
        n: number of completions of this prompt.
        logprobs: report the log-probability of each new token, and of this many most likely ones.
        prompt_logprobs: the same for the prompt's tokens, always with `logprobs_mode="raw"`.
        logprobs_mode: "raw" reports the log-probabilities of the model, "processed" those of the
            distribution that is sampled from, after bias, penalties, temperature, top-k, top-p and
            min-p. Greedy requests count as temperature 1 without filters.
        presence_penalty: subtracted from the logit of every token generated so far.
        frequency_penalty: the same, once for every time it was generated.
        repetition_penalty: divides (multiplies, if negative) the logit of every token of prompt
            and output.
        logit_bias: added to the logits of these tokens, by id.

    >>> SamplingParams(temperature=0, max_tokens=8).is_greedy
    True
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    ...
    ValueError: top_p is 1.5; it must lie in (0, 1]
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = {name: _to_python(getattr(self, name)) for name in _NUMERIC_FIELDS}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(
            self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)
        )
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        for name, (is_valid, rule) in _CONSTRAINTS.items():
            if not _is_number(value := values[name]) or not is_valid(value):
                raise ValueError(f"{name} is {value!r}; it must {rule}")
        for name in _INTEGER_FIELDS:
            value = values[name]
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := values[name]) is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more, or None for none")
        if self.logprobs_mode not in ("raw", "processed"):
            raise ValueError(
                f"logprobs_mode is {self.logprobs_mode!r}; it must be 'raw' or 'processed'"
            )
        if self.logprobs_mode == "processed" and self.logprobs is None:
            raise ValueError("logprobs_mode is 'processed', but logprobs is None; set logprobs=0")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}: lower the one "
                "or raise the other"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        # Dividing logits by less would overflow.
        return self.temperature < 1e-5

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p removes tokens before sampling."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


_INTEGER_FIELDS = ("top_k", "max_tokens", "min_tokens", "seed", "n", "logprobs", "prompt_logprobs")
_MAX_MAGNITUDE = 1e20
"""Larger values may overflow 32 bits once multiplied, summed and divided by the temperature."""
_SIGNED = f"lie in [-{_MAX_MAGNITUDE:g}, {_MAX_MAGNITUDE:g}]"
_CONSTRAINTS = {
    "temperature": (lambda x: 0 <= x <= _MAX_MAGNITUDE, f"lie in [0, {_MAX_MAGNITUDE:g}]"),
    "top_p": (lambda x: 0 < x <= 1, "lie in (0, 1]"),
    "top_k": (lambda x: x >= -1, "be a count, or 0 for all"),
    "min_p": (lambda x: 0 <= x <= 1, "lie in [0, 1]"),
    "max_tokens": (lambda x: x >= 1, "be 1 or more"),
    "min_tokens": (lambda x: x >= 0, "be 0 or more"),
    "n": (lambda x: 1 <= x <= 1024, "lie in 1..1024"),
    "presence_penalty": (lambda x: abs(x) <= _MAX_MAGNITUDE, _SIGNED),
    "frequency_penalty": (lambda x: abs(x) <= _MAX_MAGNITUDE, _SIGNED),
    "repetition_penalty": (
        lambda x: 1 / _MAX_MAGNITUDE <= x <= _MAX_MAGNITUDE,
        f"be above 0, at most {_MAX_MAGNITUDE:g}",
    ),
}
_NUMERIC_FIELDS = (*dict.fromkeys((*_CONSTRAINTS, *_INTEGER_FIELDS)), "ignore_eos")
_PYTHON_TYPES = (int, float, bool, type(None))


def _to_python(value: Any) -> Any:
    """Return the Python number of a NumPy or torch scalar; anything else unchanged."""
    if type(value) in _PYTHON_TYPES:
        return value
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop or ()
    strings = tuple(strings) if isinstance(strings, Iterable) else (strings,)
    if not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop is {stop!r}; every stop string must hold at least one character")
    return strings


def _token_ids(name: str, values: Iterable[int] | None) -> tuple[int, ...]:
    values = () if values is None else values
    ids = tuple(map(_to_python, values if isinstance(values, Iterable) else (values,)))
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ValueError(f"{name} holds {i!r}; token ids are whole numbers from 0")
    return ids


def _logit_bias(values: Mapping[int, float] | None) -> dict[int, float]:
    if values is not None and not isinstance(values, Mapping):
        raise ValueError(f"logit_bias is {values!r}; pass a dict of token ids and what to add")
    biases = {} if values is None else {_to_python(t): _to_python(b) for t, b in values.items()}
    _token_ids("logit_bias", biases)
    for bias in biases.values():
        if not _is_number(bias) or not abs(bias) <= _MAX_MAGNITUDE:
            raise ValueError(f"logit_bias holds {bias!r}; it must {_SIGNED}")
    return biases
