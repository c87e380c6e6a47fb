"""`nopad doctor --parity`: log-probabilities of generated tokens, engine against training forward.

The engine completes a few prompts and reports the log-probability of each token it sampled; one
packed training forward computes them again. The table shows the difference for each dtype and each
attention backend that can generate here. In batch-invariant rows every product has one shape, so
that rounding does not depend on the batch: in float32 on a CPU the difference is then 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from rich.text import Text

from ..attention.backends import PAGED_BACKENDS
from ..attention.hf import attention_layers, declared_state, random_documents, sequence_limit
from ..inference import Engine, LogprobParity, batch_invariant, compare_logprobs
from ..trainer.loss import attach_loss
from .terminal import printable, table

if TYPE_CHECKING:
    from rich.console import Console

PROMPT_LENGTHS = (1, 5, 16, 33, 60, 90)
MAX_TOKENS = 24
DTYPES = (torch.float32, torch.bfloat16)
MAX_MEAN = {"float32": 1e-3, "bfloat16": 0.1}
"""A larger mean difference is not rounding."""


@dataclass(frozen=True, slots=True)
class Row:
    """One dtype and backend."""

    dtype: str
    backend: str
    parity: LogprobParity | None
    """None if the backend did not run."""
    seconds: float = 0.0
    note: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether the difference exceeds rounding, or sdpa, which runs everywhere, did not run."""
        if self.parity is None:
            return self.backend == "sdpa"
        return not self.parity.mean <= MAX_MEAN[self.dtype]


def measure(model: Any) -> Iterator[Row]:
    """Compare under every dtype and backend; this casts the model."""
    model.set_attn_implementation("nopad")
    if declared_state(model) is not None:
        attach_loss(model)  # as in training, states start at zero in every document
    limit = sequence_limit(model.config.get_text_config())
    half = max(PROMPT_LENGTHS) if limit is None else limit.length // 2  # for prompt and answer each
    lengths = [min(length, half) for length in PROMPT_LENGTHS]
    prompts = [document[0].tolist() for document in random_documents(model, lengths)]
    backends = PAGED_BACKENDS if attention_layers(model) else ("sdpa",)
    for dtype in DTYPES:
        model.to(dtype)
        name = str(dtype).removeprefix("torch.")
        for backend in backends:
            yield _row(model, prompts, name, backend)
        yield _row(model, prompts, name, "sdpa", invariant_to=max(PROMPT_LENGTHS) + MAX_TOKENS)


def _row(
    model: Any, prompts: list[list[int]], dtype: str, backend: str, invariant_to: int = 0
) -> Row:
    max_tokens = min(MAX_TOKENS, max(map(len, prompts)))
    label = f"{backend}, batch-invariant" if invariant_to else backend
    began = time.perf_counter()
    try:
        with batch_invariant(invariant_to) if invariant_to else nullcontext():
            engine = Engine(model, memory=1 << 28)
            parity = compare_logprobs(model, engine, prompts, max_tokens, backend=backend)
    except Exception as error:  # kernel libraries raise many types
        note = str(error).strip().splitlines() or [type(error).__name__]
        return Row(dtype, label, None, note=shorten(note[0].split("this call: ")[-1], 100))
    return Row(dtype, label, parity, time.perf_counter() - began)


def report(out: Console, name: str, rows: list[Row]) -> None:
    """Print a table of the rows that ran, the others with their reasons, and a verdict."""
    title = "log-probabilities of generated tokens, engine against training forward"
    out.print(f"{printable(name)}: {title}\n", style="bold")
    names = ("dtype", "backend", "tokens", "mean diff", "max diff", "seconds", "")
    made = table(*names, right=names[2:6])
    for row in rows:
        if row.parity is not None:
            p = row.parity
            cells = (str(p.num_tokens), f"{p.mean:.2e}", f"{p.max:.2e}", f"{row.seconds:.1f}")
            verdict = Text("TOO LARGE", "bold red") if row.is_bad else ""
            made.add_row(row.dtype, row.backend, *cells, verdict)
    out.print(made)
    notes = [f"not run: {r.dtype} {r.backend} ({r.note})" for r in rows if r.parity is None]
    for note in ["", *notes]:
        out.print(printable(note), style="dim")
    out.print(f"\n{_verdict(rows)}" if notes else _verdict(rows))


def _verdict(rows: list[Row]) -> str:
    limits = ", ".join(f"{limit:g} in {dtype}" for dtype, limit in MAX_MEAN.items())
    rounding = f"rounding (a mean diff of at most {limits})"
    if any(row.is_bad for row in rows if row.parity is not None):
        return f"Generation and training DIFFER by more than {rounding}."
    if any(row.is_bad for row in rows):
        return "Generation was NOT compared with training: sdpa, which runs everywhere, did not."
    return f"Generation agrees with training, except for {rounding}."
