"""Does a model keep packed documents apart? One attention implementation at a time, and a table.

The oracle is the model itself with eager attention, on the documents one by one.
"""

from __future__ import annotations

import copy
import textwrap
from dataclasses import dataclass
from typing import Any

import torch

from ..attention import unsupported_reason
from ..attention.hf import PackedDifferences, check_default_cache, check_packed, check_paged
from .checkpoints import short_error
from .tiny_model import ATTENTION_DROPOUTS


@dataclass(frozen=True, slots=True)
class IsolationResult:
    """What one attention implementation did with a pack."""

    name: str
    verdict: str
    """apart, LEAK, WRONG, refused, or not run."""
    packed: PackedDifferences | None = None
    paged: float | None = None
    note: str = ""

    @property
    def bad(self) -> bool:
        return self.verdict in ("LEAK", "WRONG")

    @property
    def examined(self) -> bool:
        return self.packed is not None


def check_isolation(oracle: Any, name: str, given: Any = None) -> IsolationResult:
    """Hold one implementation against the documents run one by one with eager attention.

    given: the config as the user has it, where the oracle was built of a shrunk one.
    """
    reason = unsupported_reason(oracle) if name == "nopad" else None
    if reason is not None:
        return IsolationResult(name, "refused", note=reason)
    try:
        model = with_attention(oracle, name)
        packed = check_packed(model, oracle)
        paged = check_paged(model) if name == "nopad" else None
    except Exception as error:  # whatever a model or kernel library raises is the answer
        return IsolationResult(name, "not run", note=_short(error))
    limit = tolerance(model)
    verdict = "LEAK" if packed.leak > limit else "apart" if packed.within(limit) else "WRONG"
    if paged is not None and not paged <= limit:  # NaN is neither more nor less
        verdict = "WRONG"
    notes = [_advice(model, oracle, verdict, limit)]
    notes += _dropout(given or oracle.config) if name == "nopad" else []
    return IsolationResult(name, verdict, packed, paged, "; ".join(filter(None, notes)))


def _advice(model: Any, oracle: Any, verdict: str, limit: float) -> str:
    """What mends a leak, or what would open one."""
    stock = model.config._attn_implementation in ("sdpa", "eager")
    if verdict != "apart":
        return _repair(model, oracle, limit) if stock else ""
    leaks = not check_default_cache(model) <= limit
    return "but leaks where the batch does not say use_cache=False" if leaks else ""


def _dropout(given: Any) -> list[str]:
    """The checks drop nothing out; training would, and nopad refuses that."""
    config = given.get_text_config()
    asked = ((name, getattr(config, name, None)) for name in ATTENTION_DROPOUTS)
    return [f"trains only with {name}=0 (it is {rate})" for name, rate in asked if rate]


def with_attention(model: Any, name: str) -> Any:
    """The same weights under another attention implementation."""
    if name == model.config._attn_implementation:
        return model
    other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=name)
    if other.config._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} falls back to {other.config._attn_implementation}"
        )
    half = "flash" in name
    other = other.to(device=model.device, dtype=torch.bfloat16 if half else model.dtype)
    other.load_state_dict(model.state_dict())
    return other.eval()


def tolerance(model: Any) -> float:
    return 1e-3 if model.dtype == torch.float32 else 0.25


def _repair(model: Any, oracle: Any, limit: float) -> str:
    """Whether nopad's wrapper of the stock masks mends it."""
    try:
        mended = check_packed(model, oracle, repair=True).within(limit)
    except Exception as error:
        return f"repair failed: {_short(error)}"
    return "mended by nopad.attention.document_mask" if mended else "document_mask does not mend it"


def report(name: str, model: Any, findings: list[IsolationResult]) -> str:
    """The table, and a sentence that says what to do."""
    count = sum(p.numel() for p in model.parameters())
    lines = [f"{name}: {type(model).__name__}, {count:,} parameters, {model.device.type}", ""]
    head = ("attention", "verdict", "leak", "logits", "loss", "gradients", "paged", "note")
    rows = [head, *(_row(finding) for finding in findings)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    for row in rows:
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    bad = [finding.name for finding in findings if finding.bad]
    fine = [finding.name for finding in findings if finding.verdict == "apart"]
    lines.append("")
    if bad:
        lines.append(f"Do not train packed batches with {', '.join(bad)}.")
    if fine:
        lines.append(f"Packed documents stay apart with {', '.join(fine)}.")
    if not bad and not fine:
        lines.append("Nothing was examined: no implementation named in --attn runs here.")
    return "\n".join(lines)


def _row(finding: IsolationResult) -> tuple[str, ...]:
    packed = finding.packed
    numbers = (
        [packed.leak, packed.logits, packed.loss, packed.gradients, finding.paged]
        if packed is not None
        else [None] * 5
    )
    cells = ["-" if x is None else f"{x:.1e}" if x else "0" for x in numbers]
    return (finding.name, finding.verdict, *cells, finding.note)


def _short(error: Exception) -> str:
    return textwrap.shorten(short_error(error), 160, placeholder=" ...")
