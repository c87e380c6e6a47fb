"""`nopad doctor --parity`: does generation compute what training computes, and how nearly?

The engine continues a few prompts and reports the log-probability of each token it made; one packed
training forward computes the same ones. The table tells how far they lie apart, for each dtype and
each attention backend that can generate here. Batch-invariant rows compute every product in one
shape, so that no rounding depends on the company a token has: in float32 on a CPU, that leaves 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.backends import PAGED_BACKENDS
from ..attention.hf import random_documents
from ..inference import Engine, LogprobParity, compare_logprobs, batch_invariant

LENGTHS = (1, 5, 16, 33, 60, 90)
NEW = 24
DTYPES = (torch.float32, torch.bfloat16)
MOST = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean difference from which on it is no rounding any more."""


@dataclass(frozen=True, slots=True)
class Row:
    """One dtype and backend."""

    dtype: str
    backend: str
    found: LogprobParity | None
    seconds: float = 0.0
    note: str = ""

    @property
    def bad(self) -> bool:
        """Apart by more than rounding, or without an answer where there always is one."""
        if self.found is None:
            return self.backend.startswith("sdpa")
        return not self.found.mean <= MOST[self.dtype]


def rows(model: Any) -> Iterator[Row]:
    """Compare under every dtype and backend; the model is cast on the way."""
    model.set_attn_implementation("nopad")
    prompts = [document[0].tolist() for document in random_documents(model, LENGTHS)]
    for dtype in DTYPES:
        model.to(dtype)
        name = str(dtype).removeprefix("torch.")
        for backend in PAGED_BACKENDS:
            yield _row(model, prompts, name, backend)
        yield _row(model, prompts, name, "sdpa", invariant_to=max(LENGTHS) + NEW)


def _row(
    model: Any, prompts: list[list[int]], dtype: str, backend: str, invariant_to: int = 0
) -> Row:
    label = f"{backend}, batch-invariant" if invariant_to else backend
    began = time.perf_counter()
    try:
        with batch_invariant(invariant_to) if invariant_to else nullcontext():
            engine = Engine(model, memory=1 << 28)
            found = compare_logprobs(model, engine, prompts, NEW, attention=backend)
    except Exception as error:  # whatever a kernel library raises is the answer
        note = str(error).strip().splitlines() or [type(error).__name__]
        return Row(dtype, label, None, note=note[0].split("this call: ")[-1][:100])
    return Row(dtype, label, found, time.perf_counter() - began)


def table(name: str, made: list[Row]) -> str:
    """The rows that ran as a table, then what did not run and why."""
    lines = [f"{name}: log-probabilities of generated tokens, engine against training forward", ""]
    lines.append(
        f"{'dtype':10}{'generation by':24}{'tokens':>7}{'mean':>11}{'largest':>11}{'s':>7}"
    )
    for row in made:
        if row.found is not None:
            f = row.found
            verdict = "  TOO FAR" if row.bad else ""
            numbers = f"{f.tokens:7}{f.mean:11.2e}{f.largest:11.2e}{row.seconds:7.1f}"
            lines.append(f"{row.dtype:10}{row.backend:24}{numbers}{verdict}")
    unrun = [row for row in made if row.found is None]
    lines += ["", *(f"not run: {row.dtype} {row.backend} ({row.note})" for row in unrun)]
    return "\n".join(lines)
