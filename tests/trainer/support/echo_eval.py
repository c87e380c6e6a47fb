"""Completions, examples and metrics for tests of evaluations, without a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from nopad.trainer.evaluation import Example


@dataclass
class Done:
    """A completion."""

    text: str
    error: str | None = None
    finish_reason: str = "stop"
    token_ids: list[int] = field(default_factory=lambda: [1, 2])
    others: tuple[Done, ...] = ()


def echo(prompts, params=None, deadline=None):
    return [Done(str(prompt)) for prompt in prompts]


def equal(text, reference):
    return float(text == reference)


EXAMPLES = [Example("a", "a"), Example("b", "x"), Example("c", "c"), Example("d", "d")]


def scores(*values: float):
    """A harness whose metric takes these values, one after the other."""
    left = iter(values)
    return lambda deadline=None: {"acc": next(left)}
