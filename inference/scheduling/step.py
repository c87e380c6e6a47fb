"""A plan as arrays: all that one step puts on the device, made with whole-array operations.

plan   a: 5 tokens from 0    b: 1 from 12    c: 1 from 7
ids        [ a a a a a b c ]         positions  [ 0 1 2 3 4 12 7 ]
cu_seqlens [ 0 5 6 7 ]               lengths    [ 5 13 8 ]
slots      where each token's keys and values go
rows       tokens whose logits are wanted: the last of a, b and c
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..requests.request import Request
from ..requests.rng import uniform
from .slot_params import SlotParams


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step, on the host. R rows of logits: first those that yield tokens, then the scored."""

    requests: list[Request]
    ids: np.ndarray
    """int64 [T]; -1 - slot where the token is still on the device."""
    positions: np.ndarray
    cu_seqlens: np.ndarray
    """int32 [N+1]."""
    lengths: np.ndarray
    """int32 [N]: keys of each sequence, this step's included."""
    table: np.ndarray
    """int32 [N, P]."""
    slots: np.ndarray
    """int64 [T]: place in the cache of each token."""
    max_tokens: int
    max_length: int
    rows: np.ndarray
    """int64 [R]: indices into the T tokens."""
    yielding: list[Request]
    yield_slots: np.ndarray
    """int64 [Y]: slots of the requests whose row yields a token; the first Y rows are theirs."""
    yield_positions: np.ndarray
    """int64 [Y]: positions the new tokens take."""
    scored: list[tuple[Request, range]]
    targets: np.ndarray
    """int64 [R - Y]: the tokens to be scored."""
    top: int
    """Alternatives to report beside a token's log-probability; -1: report none at all."""
    choice: SamplingArrays


@dataclass(frozen=True, slots=True, eq=False)
class SamplingArrays:
    """The sampler's inputs for Y rows; None where no row asks for them."""

    temperature: np.ndarray | None
    uniform: np.ndarray | None
    filter_rows: np.ndarray | None
    penalty_rows: np.ndarray | None
    edits: tuple[np.ndarray, np.ndarray, np.ndarray] | None

    @property
    def plain(self) -> bool:
        """Whether every row just takes its likeliest token."""
        return self.temperature is None and self.edits is None and self.penalty_rows is None


def build(requests: list[Request], table: np.ndarray, page_size: int, columns: SlotParams) -> Step:
    """Lay out the planned tokens of the requests as one step."""
    count = len(requests)
    slot = np.fromiter((r.slot for r in requests), np.int64, count)
    start = np.fromiter((r.computed for r in requests), np.int64, count)
    run = np.fromiter((r.planned for r in requests), np.int64, count)
    known = np.fromiter((r.length for r in requests), np.int64, count)
    ends = start + run
    cu_seqlens = np.zeros(count + 1, np.int64)
    np.cumsum(run, out=cu_seqlens[1:])
    total = int(cu_seqlens[-1])
    owner = np.repeat(np.arange(count), run)
    positions = np.arange(total) + np.repeat(start - cu_seqlens[:-1], run)
    pages = table[slot[owner], positions // page_size].astype(np.int64)
    yields = ends == known
    longest = int(ends.max())
    yielding = [r for r, y in zip(requests, yields.tolist(), strict=True) if y]
    scored, score_rows, targets, top = _scored(requests, cu_seqlens)
    yield_slots = slot[yields]
    top = max(top, int(columns.logprobs[yield_slots].max(initial=-1)))
    return Step(
        requests=requests,
        ids=_ids(requests, total, cu_seqlens),
        positions=positions,
        cu_seqlens=cu_seqlens.astype(np.int32),
        lengths=ends.astype(np.int32),
        table=table[slot, : -(-longest // page_size)],
        slots=pages * page_size + positions % page_size,
        max_tokens=int(run.max()),
        max_length=longest,
        rows=np.concatenate([cu_seqlens[1:][yields] - 1, score_rows]),
        yielding=yielding,
        yield_slots=yield_slots,
        yield_positions=ends[yields],
        scored=scored,
        targets=targets,
        top=top,
        choice=_choice(yielding, yield_slots, ends[yields], columns),
    )


def _ids(requests: list[Request], total: int, cu_seqlens: np.ndarray) -> np.ndarray:
    """Token ids the host knows; a mark for those only the device does."""
    ids = np.empty(total, np.int64)
    begins = cu_seqlens.tolist()
    for request, begin in zip(requests, begins, strict=False):
        if request.in_flight:
            assert request.planned == 1, f"request {request.id} runs ahead of its tokens"
            ids[begin] = -1 - request.slot
        else:
            start = request.computed
            ids[begin : begin + request.planned] = request.tokens(start, start + request.planned)
    return ids


def _scored(
    requests: list[Request], cu_seqlens: np.ndarray
) -> tuple[list[tuple[Request, range]], np.ndarray, np.ndarray, int]:
    """Rows whose next token is known and to be scored, and those tokens."""
    scored, rows, targets, top = [], [], [], -1
    for i, request in enumerate(requests):
        if request.score_from is None:
            continue
        span = request.scored_rows(request.computed, request.computed + request.planned)
        if len(span):
            scored.append((request, span))
            rows.append(np.arange(span.start, span.stop) - request.computed + cu_seqlens[i])
            targets.append(request.prompt[span.start + 1 : span.stop + 1])
            top = max(top, request.params.prompt_logprobs or 0)
    nothing = np.empty(0, np.int64)
    return scored, np.concatenate([nothing, *rows]), np.concatenate([nothing, *targets]), top


def _choice(
    yielding: list[Request], slot: np.ndarray, positions: np.ndarray, c: SlotParams
) -> SamplingArrays:
    heat = c.temperature[slot]
    random = bool(heat.any())
    filtered = np.flatnonzero(c.filters[slot])
    penalised = np.flatnonzero(c.penalises[slot])
    return SamplingArrays(
        temperature=heat if random else None,
        uniform=uniform(c.seed[slot], positions) if random else None,
        filter_rows=filtered if len(filtered) else None,
        penalty_rows=penalised if len(penalised) else None,
        edits=_edits(yielding, np.flatnonzero(c.edited[slot])),
    )


def _edits(
    yielding: list[Request], rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Single logits to change: bias, and no end before `min_tokens`."""
    entries: list[tuple[int, int, float]] = []
    for row in rows.tolist():
        request = yielding[row]
        made = request.computed + request.planned - len(request.prompt)
        bias = request.params.logit_bias
        banned = request.stop_ids if made < request.params.min_tokens else frozenset[int]()
        entries += [(row, t, -np.inf) for t in banned]
        entries += [(row, t, b) for t, b in bias.items() if t not in banned]
    if not entries:
        return None
    at, tokens, values = zip(*entries, strict=True)
    return np.array(at), np.array(tokens), np.array(values, dtype=np.float32)
