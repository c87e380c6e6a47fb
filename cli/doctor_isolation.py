"""Are packed documents isolated from each other? One result per attention implementation.

The reference is the same model with eager attention, run on the documents one by one.
"""

from __future__ import annotations

import copy
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.text import Text

from ..attention import unsupported_reason
from ..attention.hf import (
    PackedDifferences,
    check_default_cache,
    check_packed,
    check_paged,
    check_rows,
    landmark_lengths,
    rotary_limit,
    sequence_limit,
)
from .load_pretrained import short_error
from .terminal import printable, table
from .tiny_model import ATTENTION_DROPOUTS

if TYPE_CHECKING:
    from rich.console import Console

VERDICT_STYLES = {"isolated": "green", "LEAK": "bold red", "WRONG": "bold red"}
MAX_ROW = 1200
"""Tokens in a row of the check: eager attention takes memory by their square."""
ROOM = 32
"""Tokens of the documents beside the one that exceeds a length."""


@dataclass(frozen=True, slots=True)
class IsolationResult:
    """How one attention implementation handled a pack."""

    name: str
    verdict: str
    """isolated, LEAK, WRONG, refused, or not run."""
    packed: PackedDifferences | None = None
    paged: float | None = None
    note: str = ""

    @property
    def is_bad(self) -> bool:
        return self.verdict in ("LEAK", "WRONG")

    @property
    def was_checked(self) -> bool:
        return self.packed is not None


def check_isolation(oracle: Any, name: str, config: Any = None) -> IsolationResult:
    """Compare one implementation with eager attention on the documents one by one.

    config: the user's config, if the oracle is a tiny model of it.
    """
    reason = unsupported_reason(oracle) if name == "nopad" else None
    if reason is not None:
        return IsolationResult(name, "refused", note=reason)
    try:
        model = with_attention(oracle, name)
        packed = _check_all_rows(model, oracle)
        paged = check_paged(model) if name == "nopad" else None
    except Exception as error:  # models and kernel libraries raise many types
        return IsolationResult(name, "not run", note=_shortened(error))
    limit = tolerance(model)
    verdict = "LEAK" if packed.leak > limit else "isolated" if packed.within(limit) else "WRONG"
    if paged is not None and not paged <= limit:  # also true for NaN
        verdict = "WRONG"
    notes = [_advice(model, oracle, verdict, limit), *_length_notes(model)]
    notes += _dropout_notes(config or oracle.config) if name == "nopad" else []
    return IsolationResult(name, verdict, packed, paged, "; ".join(filter(None, notes)))


def _check_all_rows(model: Any, oracle: Any, repair: bool = False) -> PackedDifferences:
    """Return the worst of a row of short documents, and of rows beyond the lengths of the model."""
    worst = check_packed(model, oracle, repair=repair)
    config = model.config.get_text_config()
    limit = sequence_limit(config) if config._attn_implementation == "nopad" else None
    positions = getattr(config, "max_position_embeddings", None) or MAX_ROW
    longest = MAX_ROW if limit is None else min(MAX_ROW, limit.length)
    if rotary_limit(config) is None:  # beyond the positions, others fail, or have none
        longest = min(longest, positions)
    rows = check_rows(config, MAX_ROW, longest)
    for lengths in (row for length in rows if length for row in rows[length]):
        worst = worst.worst(check_packed(model, oracle, repair=repair, lengths=lengths))
    return worst


def _length_notes(model: Any) -> list[str]:
    """Name the longest document, and lengths that no document of the check exceeds."""
    config = model.config.get_text_config()
    limit = sequence_limit(config) if config._attn_implementation == "nopad" else None
    notes = [] if limit is None else [f"documents of at most {limit.length}: {limit.reason}"]
    unseen = [str(n) for n in landmark_lengths(config) if n >= MAX_ROW - ROOM]
    if unseen:
        notes.append(f"not examined beyond {', '.join(unseen)} tokens: --tiny does it in small")
    return notes


def _advice(model: Any, oracle: Any, verdict: str, limit: float) -> str:
    """Say what fixes a leak, or what would cause one."""
    is_stock = model.config._attn_implementation in ("sdpa", "eager")
    if verdict != "isolated":
        return _try_repair(model, oracle, limit) if is_stock else ""
    leaks = not check_default_cache(model) <= limit
    return "leaks if the batch lacks use_cache=False" if leaks else ""


def _dropout_notes(config: Any) -> list[str]:
    """Name attention dropout, which nopad refuses in training; the checks run without it."""
    text_config = config.get_text_config()
    rates = ((name, getattr(text_config, name, None)) for name in ATTENTION_DROPOUTS)
    return [f"trains only with {name}=0 (it is {rate})" for name, rate in rates if rate]


def with_attention(model: Any, name: str) -> Any:
    """Return the same weights under another attention implementation."""
    if name == model.config._attn_implementation:
        return model
    other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=name)
    if other.config._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} falls back to {other.config._attn_implementation}"
        )
    dtype = torch.bfloat16 if "flash" in name else model.dtype
    other = other.to(device=model.device, dtype=dtype)
    other.load_state_dict(model.state_dict())
    return other.eval()


def tolerance(model: Any) -> float:
    """Return the largest difference that counts as rounding."""
    return 1e-3 if model.dtype == torch.float32 else 0.25


def _try_repair(model: Any, oracle: Any, limit: float) -> str:
    """Say whether nopad's wrapper of the stock masks fixes it."""
    try:
        is_fixed = _check_all_rows(model, oracle, repair=True).within(limit)
    except Exception as error:
        return f"document_mask failed: {_shortened(error)}"
    if is_fixed:
        return "fixed by nopad.attention.document_mask"
    return "not fixed by nopad.attention.document_mask"


def report(out: Console, name: str, model: Any, results: list[IsolationResult]) -> None:
    """Print the table, and a sentence that says which implementations to use."""
    count = sum(p.numel() for p in model.parameters())
    kind = f"{type(model).__name__}, {count:,} parameters, {model.device.type}"
    out.print(printable(f"{name}: {kind}"), style="bold")
    out.print("largest differences from the documents one by one, with eager attention:\n")
    made = table("attention", "verdict", "leak", "logits", "loss", "gradients", "paged", "note")
    for result in results:
        cells = [Text(printable(cell)) for cell in _table_row(result)]
        cells[1].stylize(VERDICT_STYLES.get(result.verdict, "dim"))
        made.add_row(*cells)
    out.print(made)
    out.print("")
    bad = [result.name for result in results if result.is_bad]
    good = [result.name for result in results if result.verdict == "isolated"]
    if bad:
        out.print(f"Do not train packed batches with {', '.join(bad)}.", style="bold red")
    if good:
        out.print(f"Packed documents are isolated with {', '.join(good)}.", style="green")
    if not bad and not good:
        out.print("Nothing was checked: no implementation named in --attn runs here.")


def _table_row(result: IsolationResult) -> tuple[str, ...]:
    packed = result.packed
    numbers = (
        [packed.leak, packed.logits, packed.loss, packed.gradients, result.paged]
        if packed is not None
        else [None] * 5
    )
    cells = ["-" if x is None else f"{x:.1e}" if x else "0" for x in numbers]
    return (result.name, result.verdict, *cells, result.note)


def _shortened(error: Exception) -> str:
    return textwrap.shorten(short_error(error), 160, placeholder=" ...")
