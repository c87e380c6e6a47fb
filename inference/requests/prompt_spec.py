"""`PromptSpec`: give each prompt of a call its parameters, priority and deadline, checked.

An argument of a call may be one value for all prompts or one value for each. Values of a wrong type
or number raise before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from numbers import Integral, Real
from typing import Any, NamedTuple

from .batch_encoding import split_batch
from .sampling_params import SamplingParams
from .tokenizer_adapter import Prompt

Params = SamplingParams | Mapping[str, Any] | None
_EXPECTED = {
    "params": "SamplingParams or a dict",
    "priority": "a whole number",
    "deadline": "seconds or None",
}


class PromptSpec(NamedTuple):
    """A prompt with its own parameters, priority and seconds it may take."""

    prompt: Prompt
    params: SamplingParams
    priority: int
    seconds: float


def broadcast_params(
    prompts: Sequence[Prompt] | Mapping[str, Any],
    params: Params | Sequence[Params],
    priority: int | Sequence[int] = 0,
    deadline: float | Sequence[float | None] | None = None,
) -> list[PromptSpec]:
    """Give every prompt its own parameters, priority and deadline; ValueError for wrong ones."""
    prompts = split_batch("prompts", prompts)
    if not _is_list(prompts):
        raise ValueError(f"prompts is one {type(prompts).__name__}; pass a list of prompts")
    num_prompts = len(prompts)
    checked: dict[int, SamplingParams] = {}

    def convert(one: Any) -> SamplingParams:
        if id(one) not in checked:
            checked[id(one)] = to_sampling_params(one)
        return checked[id(one)]

    scalar = (SamplingParams, Mapping, type(None))
    all_params = _broadcast("params", params, num_prompts, scalar, convert)
    priorities = _broadcast("priority", priority, num_prompts, (Integral,), _check_priority)
    seconds = _broadcast("deadline", deadline, num_prompts, (Real, type(None)), deadline_seconds)
    return list(map(PromptSpec, prompts, all_params, priorities, seconds))


def to_sampling_params(params: Any) -> SamplingParams:
    """Return sampling parameters that may be given as a dict, or None for the defaults."""
    if isinstance(params, SamplingParams):
        return params
    if params is None:
        return SamplingParams()
    if isinstance(params, Mapping):
        try:
            return SamplingParams(**params)
        except TypeError as error:
            raise ValueError(f"sampling parameters: {error}") from None
    raise ValueError(f"sampling parameters are a {type(params).__name__}; pass SamplingParams")


def deadline_seconds(deadline: Any) -> float:
    """Seconds that a deadline allows; None allows any time."""
    if deadline is None:
        return float("inf")
    if not isinstance(deadline, Real) or deadline != deadline:
        raise ValueError(f"deadline is {deadline!r}; pass {_EXPECTED['deadline']}")
    return float(deadline)


def _check_priority(value: Any) -> Any:
    if not isinstance(value, Integral):
        raise ValueError(f"priority is {value!r}; pass {_EXPECTED['priority']}")
    return value


def _broadcast(
    name: str,
    value: Any,
    count: int,
    scalar_types: tuple[type, ...],
    convert: Callable[[Any], Any],
) -> list[Any]:
    """One converted value for each prompt; a single value is converted once."""
    if isinstance(value, scalar_types):
        return [convert(value)] * count
    if not _is_list(value):
        raise ValueError(f"{name} is {value!r}; pass {_EXPECTED[name]}, or one for each prompt")
    if len(value) != count:
        raise ValueError(f"{len(value)} {name} for {count} prompts; pass one, or one for each")
    return [convert(one) for one in list(value)]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sized) and not isinstance(value, str)
