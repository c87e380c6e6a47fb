"""How one request is to be continued: the knobs of sampling, under the names vLLM gave them.

Nothing here is clamped or guessed: a value that cannot be meant raises, naming itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request.

    >>> SamplingParams(temperature=0, max_tokens=8).is_greedy
    True
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    ...
    ValueError: top_p is 1.5; it must lie in (0, 1]
    """

    temperature: float = 1.0
    """0 takes the likeliest token and needs no random numbers; so does less than 1e-5."""
    top_p: float = 1.0
    """Draw only from the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Draw only from this many likeliest tokens; 0 or -1: from all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    max_tokens: int = 16
    """Stop after this many new tokens."""
    min_tokens: int = 0
    """No end-of-text and no stop token before this many new tokens."""
    stop: str | tuple[str, ...] | list[str] = ()
    """Strings that end the text; they are cut off."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Tokens that end the text besides the model's own end-of-text tokens."""
    ignore_eos: bool = False
    """Generate on past end-of-text."""
    seed: int | None = None
    """A draw depends on (seed, request, position) alone; None: the engine's seed."""
    n: int = 1
    """Completions wanted for this prompt."""
    logprobs: int | None = None
    """Log-probability of each new token, and of this many likeliest alternatives."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """The same, once for every time it was generated."""
    repetition_penalty: float = 1.0
    """Divides (or multiplies, below zero) the logit of every token of the prompt and the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if type(value := getattr(self, name)) not in _PLAIN:
                object.__setattr__(self, name, _plain(value))
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name, (holds, law) in _LAWS.items():
            value = getattr(self, name)
            if not _is_number(value) or not holds(value):
                raise ValueError(f"{name} is {value!r}; it must {law}")
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more, or None for none")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}: lower the one "
                "or raise the other"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        # Divided by less, logits would pass what floats can hold.
        return self.temperature < 1e-5

    @property
    def has_filters(self) -> bool:
        """Whether some tokens are cut from the distribution before the draw."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


_WHOLE = ("top_k", "max_tokens", "min_tokens", "seed", "n", "logprobs", "prompt_logprobs")
_MOST = 1e20
"""What is larger, 32 bits may not hold once it was multiplied, added up and cooled."""
_LAWS = {
    "temperature": (lambda x: 0 <= x <= _MOST, f"lie in [0, {_MOST:g}]"),
    "top_p": (lambda x: 0 < x <= 1, "lie in (0, 1]"),
    "top_k": (lambda x: x >= -1, "be a count, or 0 for all"),
    "min_p": (lambda x: 0 <= x <= 1, "lie in [0, 1]"),
    "max_tokens": (lambda x: x >= 1, "be 1 or more"),
    "min_tokens": (lambda x: x >= 0, "be 0 or more"),
    "n": (lambda x: 1 <= x <= 1024, "lie in 1..1024"),
    "presence_penalty": (lambda x: abs(x) <= _MOST, f"lie in [-{_MOST:g}, {_MOST:g}]"),
    "frequency_penalty": (lambda x: abs(x) <= _MOST, f"lie in [-{_MOST:g}, {_MOST:g}]"),
    "repetition_penalty": (lambda x: 1 / _MOST <= x <= _MOST, f"be above 0, at most {_MOST:g}"),
}
_NUMBERS = (*dict.fromkeys((*_LAWS, *_WHOLE)), "ignore_eos")
_PLAIN = (int, float, bool, type(None))


def _plain(value: Any) -> Any:
    """A number as Python has it, if it is one of NumPy's or torch's; else what was given."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop is {stop!r}; every stop string must hold at least one character")
    return strings


def _ids(name: str, given: Iterable[int] | None) -> tuple[int, ...]:
    ids = tuple(_plain(i) for i in (() if given is None else given))
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ValueError(f"{name} holds {i!r}; token ids are whole numbers from 0")
    return ids


def _biases(given: Mapping[int, float] | None) -> dict[int, float]:
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"logit_bias is {given!r}; give a dict of token ids and what to add")
    biases = {} if given is None else {_plain(t): _plain(bias) for t, bias in given.items()}
    _ids("logit_bias", biases)
    for bias in biases.values():
        if not _is_number(bias) or not abs(bias) <= _MOST:
            raise ValueError(f"logit_bias holds {bias!r}; it must lie in [-{_MOST:g}, {_MOST:g}]")
    return biases
