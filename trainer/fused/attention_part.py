"""Attention modules whose queries, keys and values are one operation.

The module's own forward runs: for its time the three layers hand out what was made of their input
together. That they are asked with the module's input, and nothing else, is seen in a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from .class_swap import FUSED, is_plain_linear, serves
from .equivalence import agree, copies, wave
from .qkv_linear import joint_products

NAMES = "q_proj", "k_proj", "v_proj"


def matches(part: Any) -> bool:
    return set(NAMES) <= part._modules.keys() and all(map(is_plain_linear, _layers(part)))


def forward(part: Any, *args: Any, **options: Any) -> Any:
    x: Any = args[0] if args else options.get("hidden_states")
    layers = _layers(part)
    if not (serves(x) and torch.is_grad_enabled() and all(map(is_plain_linear, layers))):
        return None
    made = joint_products(x, layers)
    answers = [_answer(x, *pair) for pair in zip(layers, made, strict=True)]
    with _answering(layers, answers):
        return getattr(type(part), FUSED).forward(part, *args, **options)


def _answer(x: Tensor, layer: nn.Linear, made: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda given: made if given is x else nn.Linear.forward(layer, given)


@contextmanager
def _answering(layers: Sequence[Any], answers: Sequence[Callable]) -> Iterator[None]:
    """Have layers answer like this, for a while."""
    for layer, answer in zip(layers, answers, strict=True):
        layer.forward = answer
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)  # another thread may have been first


def agrees(part: Any, twin: Any, device: torch.device) -> bool:
    """Look whom the three are asked for, and try them on their own, where they will train."""
    layers = _layers(part)
    if not _asked_of_its_input(part, layers):
        return False
    return all(_agrees(list(copy)) for copy in copies(nn.ModuleList(layers), device))


def _agrees(layers: list[nn.Linear]) -> bool:
    weights = [p for layer in layers for p in layer.parameters()]
    x = wave(weights[0], 1, 5, layers[0].in_features)
    return agree(
        lambda x: tuple(layer(x) for layer in layers),
        lambda x: joint_products(x, layers),
        [x],
        weights,
    )


def _asked_of_its_input(part: Any, layers: list[nn.Linear]) -> bool:
    x = layers[0].weight.new_zeros(1, 2, layers[0].in_features)
    asked: list[bool] = []

    def answer(given: Tensor, width: int) -> Tensor:
        asked.append(given is x)
        return x.new_zeros(1, 2, width)

    answers = [lambda given, width=layer.out_features: answer(given, width) for layer in layers]
    required = signature(type(part).forward).parameters.values()
    nothing = {p.name: None for p in list(required)[2:] if p.default is Parameter.empty
               and p.kind is not Parameter.VAR_KEYWORD}  # fmt: skip
    # Without angles or anything else, it may fail once it has its three products.
    with torch.no_grad(), _answering(layers, answers), suppress(Exception):
        type(part).forward(part, x, **nothing)
    return len(asked) >= len(layers) and all(asked)


def _layers(part: Any) -> list[nn.Linear]:
    return [getattr(part, name) for name in NAMES]
