"""`nopad doctor MODEL`: compare packs with documents alone; print which attention is right.

The reference is the same model with eager attention, run on the documents one by one.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
    declared_state,
    landmark_lengths,
    probe_rows,
    rotary_limit,
    sequence_limit,
)
from ..trainer.loss import attach_loss
from .load_pretrained import short_error
from .terminal import printable, table
from .tiny_model import ATTENTION_DROPOUTS

if TYPE_CHECKING:
    from rich.console import Console

MASKS, RESETS = "repairing the masks", "resetting states at document boundaries"
VERDICT_STYLES = {"isolated": "green", "LEAK": "bold red", "WRONG": "bold red"}
MAX_ROW = 1200
"""Tokens in a row of the check: the memory of eager attention is quadratic in them."""
ROOM = 32
"""Tokens of the documents beside the one that exceeds a length."""
MAX_WIDTH, MAX_NOTE = 100, 80
"""Columns of the report, also in a pipe, and characters of a note."""
LEGEND = """\
a pack against its documents one by one (eager attention), largest differences
leak: gradient that reaches other documents, 0 if none; engine: paged cache
"""


@dataclass(frozen=True, slots=True)
class IsolationResult:
    """How one attention implementation handled a pack."""

    name: str
    verdict: str
    """isolated, LEAK, WRONG, refused, or not run."""
    packed: PackedDifferences | None = None
    paged: float | None = None
    """Logits of generation over the paged cache against those of the packed row."""
    engine_fault: str = ""
    """The fault of generation; empty if there is none, or if it was not examined."""
    note: str = ""
    condition: str = ""
    """A condition under which training is right."""
    repair: str = ""
    """What our trainers do to make it right; empty if nothing helps, or none is needed."""

    @property
    def is_right_in_trainers(self) -> bool:
        return self.verdict == "isolated" or bool(self.repair)

    @property
    def is_bad(self) -> bool:
        """Whether packed rows are wrong, in a loop without nopad's trainers."""
        return self.verdict in ("LEAK", "WRONG")

    @property
    def was_checked(self) -> bool:
        return self.packed is not None or self.paged is not None


def check_isolation(oracle: Any, name: str, config: Any = None) -> IsolationResult:
    """Compare one implementation with eager attention on the documents one by one.

    config: the user's config, if the oracle is a tiny model of it.
    """
    reason = unsupported_reason(oracle) if name == "nopad" else None
    if reason is not None and not _has_state(oracle):
        return IsolationResult(name, "refused", note=reason)
    if reason is not None:  # packs need the state reset, the engine keeps it
        model, generation = with_attention(oracle, name), unsupported_reason(oracle, states=True)
        paged, fault = _check_engine(model, tolerance(model)) if not generation else (None, "")
        fault = f"refused, {generation}" if generation else fault
        repair = _find_repair(model, oracle)
        return IsolationResult(name, "refused", None, paged, fault, note=reason, repair=repair)
    try:
        model = with_attention(oracle, name)
        _check_backward(model)
        packed = _check_all_rows(model, oracle)
    except Exception as error:  # models and kernel libraries raise many types
        return IsolationResult(name, "not run", note=_short_reason(error))
    limit = tolerance(model)
    verdict = "LEAK" if packed.leak > 0 else "isolated" if packed.within(limit) else "WRONG"
    paged, engine_fault = _check_engine(model, limit) if name == "nopad" else (None, "")
    is_bad = verdict != "isolated"
    if is_bad and name == "nopad":  # generation is compared with the packed row
        engine_fault = engine_fault or "wrong, it computes attention as the packed row does"
    notes = [*_unseen_lengths(model), *(_cache_notes(model) if not is_bad else ())]
    conditions = _conditions(model, config or oracle.config) if name == "nopad" else []
    return IsolationResult(
        name,
        verdict,
        packed,
        paged,
        engine_fault,
        note="; ".join(notes),
        condition=" and ".join(conditions),
        repair=_find_repair(model, oracle) if is_bad and name != "nopad" else "",
    )


def _check_engine(model: Any, limit: float) -> tuple[float | None, str]:
    """Return how far generation over the paged cache is from the packed row, and the fault.

    Of models with a state, from the documents one by one.
    """
    try:
        difference = check_paged(model)
    except Exception as error:  # models and kernel libraries raise many types
        return None, f"does not run ({_short_reason(error)})"
    if difference <= limit:
        return difference, ""
    return difference, f"wrong, logits differ from those of the packed row by {difference:.1e}"


def _check_backward(model: Any) -> None:
    """Raise if flex_attention cannot train here: its own error follows seconds of compilation."""
    if model.config._attn_implementation == "flex_attention" and model.device.type == "cpu":
        from torch.nn.attention.flex_attention import flex_attention

        tiny = torch.zeros(1, 1, 16, 16, requires_grad=True)
        flex_attention(tiny, tiny, tiny)


def _check_all_rows(model: Any, oracle: Any, repair: bool = False) -> PackedDifferences:
    """Return the worst of a row of short documents, and of rows beyond the lengths of the model."""
    worst = check_packed(model, oracle, repair=repair)
    config = model.config.get_text_config()
    limit = sequence_limit(config) if config._attn_implementation == "nopad" else None
    positions = getattr(config, "max_position_embeddings", None) or MAX_ROW
    longest = MAX_ROW if limit is None else min(MAX_ROW, limit.length)
    if rotary_limit(config) is None:  # beyond the positions, others fail, or have none
        longest = min(longest, positions)
    rows = probe_rows(config, MAX_ROW, longest)
    for lengths in (row for length in rows if length for row in rows[length]):
        worst = worst.worst(check_packed(model, oracle, repair=repair, lengths=lengths))
    return worst


def _unseen_lengths(model: Any) -> list[str]:
    """Name the lengths that no document of the check exceeds."""
    unseen = [
        str(n) for n in landmark_lengths(model.config.get_text_config()) if n >= MAX_ROW - ROOM
    ]
    return [f"not examined beyond {', '.join(unseen)} tokens: use --tiny"] if unseen else []


def _cache_notes(model: Any) -> list[str]:
    """Name the setting of the batch without which documents leak."""
    leaks = check_default_cache(model) != 0.0
    return ["needs use_cache=False in the batch (our collators set it)"] if leaks else []


def _conditions(model: Any, config: Any) -> list[str]:
    """Name the longest document, and attention dropout: nopad refuses what exceeds them."""
    limit = sequence_limit(model.config.get_text_config())
    longest = [] if limit is None else [f"documents of at most {limit.length} tokens"]
    text_config = config.get_text_config()
    rates = ((name, getattr(text_config, name, None)) for name in ATTENTION_DROPOUTS)
    return longest + [f"{name}=0 instead of {rate}" for name, rate in rates if rate]


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


def _find_repair(model: Any, oracle: Any) -> str:
    """Return what our trainers do to make it right; empty if it stays wrong."""
    model, limit = copy.deepcopy(model), tolerance(model)
    attach_loss(model)
    for name, masks in ((RESETS, False), (MASKS, True)):
        if (name == RESETS and not _has_state(model)) or (masks and _is_nopad(model)):
            continue
        with suppress(Exception):  # a model may fail with masks that it does not expect
            if _check_all_rows(model, oracle, repair=masks).within(limit):
                return name
    return ""


def _has_state(model: Any) -> bool:
    return declared_state(model) is not None


def _is_nopad(model: Any) -> bool:
    return model.config._attn_implementation == "nopad"


def report(
    out: Console, name: str, model: Any, results: list[IsolationResult], lacks: list[str]
) -> None:
    """Print the table, notes, and where each implementation may be used.

    lacks: kinds of layers that a tiny model does not have, although its config or type does.
    """
    out.width = min(out.width, MAX_WIDTH)
    count = sum(p.numel() for p in model.parameters())
    kind = f"{type(model).__name__}, {count:,} parameters, {model.device.type}"
    out.print(printable(f"{name}: {kind}"), style="bold")
    out.print(LEGEND)
    made = table("attention", "verdict", "leak", "logits", "loss", "gradients", "engine")
    for result in results:
        cells = [Text(printable(cell)) for cell in _table_row(result)]
        cells[1].stylize(VERDICT_STYLES.get(result.verdict, "dim"))
        made.add_row(*cells)
    out.print(made)
    out.print("")
    notes: dict[str, list[str]] = {}
    for result in results:
        if result.note and result.verdict != "refused":
            notes.setdefault(result.note, []).append(result.name)
    for note, names in notes.items():
        out.print(printable(f"{', '.join(names)}: {note}"), style="dim")
    if notes:
        out.print("")
    verdicts = [_own_loop_verdict(results), *_engine_verdicts(results), _trainers_verdict(results)]
    verdicts += [(line, False) for line in not_examined(lacks)]
    for line, is_good in verdicts:
        out.print(printable(line), style="green" if is_good else "bold red")


def not_examined(lacks: list[str]) -> list[str]:
    """Say which kinds of layers the verdicts say nothing about.

    >>> not_examined(["Conv"])
    ['Not examined: Conv, which this tiny model does not have; pass a checkpoint that has it.']
    """
    if not lacks:
        return []
    names, them = ", ".join(lacks), "it" if len(lacks) == 1 else "them"
    lacked = f"{names}, which this tiny model does not have"
    return [f"Not examined: {lacked}; pass a checkpoint that has {them}."]


def _trainers_verdict(results: list[IsolationResult]) -> tuple[str, bool]:
    """Say with which attention nopad's trainers are right, and why they refuse the others.

    They check the same before the first step, and repair the masks of stock attention.
    """
    good = [result for result in results if result.verdict == "isolated"]
    faults = _faults(result for result in results if not result.is_right_in_trainers)
    parts = [f"right with {', '.join(map(_with_condition, good))}"] if good else []
    parts += [f"right with {names} by {repair}" for repair, names in _repairs(results)]
    has_right = bool(parts)
    parts += [f"refused with {faults}"] if faults else []
    return f"With nopad's trainers: {'; '.join(parts) or 'not known'}.", has_right


def _own_loop_verdict(results: list[IsolationResult]) -> tuple[str, bool]:
    """Say which attention is right in the user's own loop, where nothing repairs the masks."""
    good = [result for result in results if result.verdict == "isolated"]
    faults = _faults(result for result in results if result.is_bad)
    if not good and not faults:
        return "Nothing was checked: no implementation named in --attn runs here.", False
    parts = [f"right with {', '.join(map(_with_condition, good))}"] if good else []
    parts += [f"not with {faults}"] if faults else []
    own = {MASKS: "nopad.attention.document_mask around the forward", RESETS: "attach_loss(model)"}
    parts += [f"{own[repair]} repairs {names}" for repair, names in _repairs(results)]
    return f"In your own loop with PackedCollator: {'; '.join(parts)}.", not faults


def _repairs(results: list[IsolationResult]) -> Iterator[tuple[str, str]]:
    """Yield each repair, and the implementations that need it."""
    for repair in (MASKS, RESETS):
        names = [result.name for result in results if result.repair == repair]
        if names:
            yield repair, ", ".join(names)


def _engine_verdicts(results: list[IsolationResult]) -> Iterator[tuple[str, bool]]:
    """Say whether the engine generates what the packed row predicts."""
    for result in results:
        if result.paged is not None or result.engine_fault:
            yield f"With nopad's Engine: {result.engine_fault or 'right'}.", not result.engine_fault


def _faults(results: Iterable[IsolationResult]) -> str:
    """Name the implementations that are refused or wrong, by reason."""
    said = {"LEAK": "documents leak", "WRONG": "results differ"}
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.verdict != "not run":
            reasons.setdefault(said.get(result.verdict, result.note), []).append(result.name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())


def _with_condition(result: IsolationResult) -> str:
    return f"{result.name} (needs {result.condition})" if result.condition else result.name


def _table_row(result: IsolationResult) -> tuple[str, ...]:
    packed = result.packed
    numbers = (
        [packed.leak, packed.logits, packed.loss, packed.gradients, result.paged]
        if packed is not None
        else [None] * 4 + [result.paged]
    )
    cells = ["-" if x is None else f"{x:.1e}" if x else "0" for x in numbers]
    return (result.name, result.verdict, *cells)


def _short_reason(error: Exception) -> str:
    """Say in a few words why an implementation did not run; libraries write paragraphs.

    >>> _short_reason(ValueError("GPT does not support Flash Attention 2 yet. Please request ..."))
    'GPT does not support it'
    """
    text = short_error(error)
    if isinstance(error, ImportError) and "FlashAttention" in text:
        return "flash-attn is not installed"
    if "does not support backward on CPU" in text:
        return "no backward on a CPU"
    if " does not support " in text and "Please request" in text:
        return f"{text.split()[0]} does not support it"
    return textwrap.shorten(text.split(". ")[0], MAX_NOTE, placeholder=" ...")
