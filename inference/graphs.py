"""Steps as CUDA graphs: one launch instead of hundreds.

A graph is good for one number of tokens, of sequences and of columns of the page table, so each
goes up a ladder; what is past the step carries no request and writes nowhere. In decode steps every
sequence runs one token; steps that mix prompts in are graphs of their own, as long as they are so
small that launching them one by one would take longer than running them. A graph holds the
attention kernels it was captured with, so one asked for by name has graphs of its own. Graphs are
captured when first needed and stay good while the weights stay where they are: an optimizer updates
them in place. Once they have taken the memory set aside for them, a step uses the next larger graph
there is, or none.

    host ─one copy─▶ ids, positions, slots, lengths, table, … ─▶ [ graph: model, likeliest token ]
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention import PagedCache, Pages, Varlen
from ..attention.backends.choice import reader_of_pages
from .batch import Step
from .capturing import for_capture, streams
from .garbage import no_collections
from .memory import does_not_fit
from .sampler import Choice, sample
from .staging import pack, views

Forward = Callable[[Tensor, Tensor, Varlen, Tensor | int], Tensor]

log = logging.getLogger("nopad.inference")

SEGMENTS = 40 << 20
"""Memory comes in segments of 2 and 20 MiB: graphs take some of each, however little they keep."""
LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
MIXED = (256, 512, 1024, 2048)
"""Tokens of steps that mix prompts and decodes; larger ones keep a device busy by themselves."""


class Shape(NamedTuple):
    """What a graph is good for."""

    by: str | None
    """The attention backend asked for by name."""
    mixed: bool
    """Whether some sequences run several tokens, or rows are scored."""
    tokens: int
    sequences: int
    """And as many rows of logits."""
    width: int
    """Columns of the page table."""


def rung(count: int) -> int:
    """The smallest size of the ladder that holds `count` rows.

    >>> [rung(n) for n in (1, 3, 100, 256, 257, 1000)]
    [1, 4, 112, 256, 320, 1024]
    """
    if count > LADDER[-1]:
        return -(-count // 64) * 64
    return LADDER[bisect_left(LADDER, count)]


def rungs(most: int) -> list[int]:
    """All sizes up to the one that holds `most` rows.

    >>> rungs(5)
    [1, 2, 4, 8]
    """
    return sorted({rung(count) for count in range(1, most + 1)})


def shape_of(step: Step) -> Shape | None:
    """The graph a step asks for; None: it keeps a device busy without one."""
    tokens, sequences = len(step.ids), len(step.requests)
    pages = step.table.shape[1]
    if tokens == sequences == len(step.yielding) == len(step.rows):
        size = rung(sequences)
        return Shape(reader_of_pages(), False, size, size, _power(pages, 4))
    if tokens > MIXED[-1]:
        return None
    rows = mixed_rung(max(sequences, len(step.rows)))
    size = MIXED[bisect_left(MIXED, tokens)]
    return Shape(reader_of_pages(), True, size, rows, _power(pages, 16))


def mixed_rung(count: int) -> int:
    """Sequences of a graph for mixed steps: few sizes, since tokens are what such a step costs.

    >>> [mixed_rung(n) for n in (1, 17, 200, 300)]
    [16, 64, 256, 512]
    """
    return 16 if count <= 16 else 64 if count <= 64 else -(-count // 256) * 256


def _power(count: int, least: int) -> int:
    """The power of two, from `least`, that holds `count`."""
    return max(least, 1 << (count - 1).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    logits: Tensor
    tokens: Tensor


def graph_bytes(max_running: int, vocabulary: int, itemsize: int, hidden: int = 0) -> int:
    """What graphs keep: logits for every batch size, those of mixed steps, half-filled segments.

    What the largest mixed step computes in between goes with it, about 16 `hidden` to a token.

    >>> graph_bytes(4, 1000, 2) - SEGMENTS
    57500
    """
    mixed = {mixed_rung(count) for count in range(1, max_running + 1)}
    logits = (sum(rungs(max_running)) + sum(mixed)) * vocabulary
    return (logits + MIXED[-1] * 16 * hidden) * itemsize * 5 // 4 + SEGMENTS


class StepGraphs:
    """Graphs of one model over one cache, within `room` bytes."""

    def __init__(self, cache: PagedCache, newest: Tensor, room: int):
        self._cache = cache
        self._newest = newest
        """Newest token of each slot; the last entry takes what padding yields."""
        self._room = room
        self._taken = 0
        self._captured: dict[Shape, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._captured)

    def serves(self, step: Step) -> bool:
        """Whether the step is one that graphs are made for, and one is there or can be made."""
        return self._shape(step) is not None

    def run(self, step: Step, forward: Forward) -> tuple[Tensor, Tensor, int] | None:
        """Replay the step: logits [R, V], likeliest tokens [Y], number of padding tokens.

        None where its graph did not fit the memory: no more are captured then.
        """
        shape = self._shape(step)
        assert shape is not None
        inputs = _padded(step, shape, len(self._newest) - 1)
        if shape not in self._captured:
            try:
                self._captured[shape] = self._capture(shape, inputs, forward)
            except RuntimeError as error:
                if not does_not_fit(error):
                    raise
                self._taken = self._room
                log.warning("steps run without more graphs: no memory for %d rows", shape.tokens)
                return None
        captured = self._captured[shape]
        captured.inputs.copy_(pack(inputs)[0], non_blocking=True)
        captured.graph.replay()
        logits, tokens = captured.logits[: len(step.rows)], captured.tokens[: len(step.yielding)]
        return logits, tokens, shape.tokens - len(step.ids)

    def _shape(self, step: Step) -> Shape | None:
        """The graph for a step: the smallest, or the smallest there is."""
        shape = shape_of(step)
        if shape is None or shape in self._captured or self._taken < self._room:
            return shape
        large = (s for s in self._captured if s[:2] == shape[:2] and _covers(s, shape))
        return min(large, default=None)

    def _capture(self, shape: Shape, inputs: _Inputs, forward: Forward) -> _Captured:
        blank = _blank(inputs, nobody=len(self._newest) - 1)
        packed, places = pack(blank)
        on_device = packed.to(self._newest.device)
        given = _Inputs(*views(on_device, blank, places))
        stream = streams(on_device.device)[0]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with for_capture():
            with torch.cuda.stream(stream):
                self._step(shape, given, forward)  # what is done once only, is done here
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.empty_cache()  # a graph takes memory of its own, not what is cached
            before = torch.cuda.memory_reserved(on_device.device)
            # Not `torch.cuda.graph`: it waits for the device and gives back pinned memory as well.
            with torch.cuda.stream(stream), _recording(graph, self._pool):
                logits, tokens = self._step(shape, given, forward)
            self._taken += torch.cuda.memory_reserved(on_device.device) - before
        return _Captured(graph, on_device, logits, tokens)

    def _step(self, shape: Shape, given: _Inputs, forward: Forward) -> tuple[Tensor, Tensor]:
        """What a graph holds: the logits, and their likeliest tokens, kept for the next step."""
        reach = shape.width * self._cache.page_size
        pages = Pages(self._cache, given.table, given.lengths, given.slots, reach)
        varlen = Varlen(given.bounds, shape.tokens if shape.mixed else 1, pages)
        logits = forward(given.ids, given.positions, varlen, given.rows if shape.mixed else 0)
        tokens = sample(logits, Choice())
        self._newest.index_copy_(0, given.owners, tokens.clamp(min=0))
        return logits, tokens


def _covers(large: Shape, small: Shape) -> bool:
    return all(a >= b for a, b in zip(large[2:], small[2:], strict=True))


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what runs inside; where that fails, the reason is told, not the broken capture."""
    with no_collections():
        graph.capture_begin(pool=pool)
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()


class _Inputs(NamedTuple):
    """What a graph reads; arrays on the host, or tensors on the device."""

    ids: Any
    positions: Any
    slots: Any
    rows: Any
    """Tokens whose logits are wanted; decode steps want them all."""
    owners: Any
    """The requests' slots that those rows yield a token for."""
    lengths: Any
    bounds: Any
    table: Any


def _padded(step: Step, shape: Shape, nobody: int) -> _Inputs:
    """The step's arrays, with tokens and sequences that carry no request up to the shape.

    Each sequence of the padding has one token, as long as there are any.
    """
    total, count = len(step.ids), len(step.requests)
    table = np.zeros((shape.sequences, shape.width), np.int32)
    table[:count, : step.table.shape[1]] = step.table
    bounds = np.arange(total - count, total - count + shape.sequences + 1, dtype=np.int32)
    bounds[: count + 1] = step.cu_seqlens
    return _Inputs(
        ids=_extended(step.ids, shape.tokens, 0),
        positions=_extended(step.positions, shape.tokens, 0),
        slots=_extended(step.slots, shape.tokens, -1),
        rows=_extended(step.rows, shape.sequences, 0),
        owners=_extended(step.yield_slots, shape.sequences, nobody),
        lengths=_extended(step.lengths, shape.sequences, 1),
        bounds=np.minimum(bounds, shape.tokens),
        table=table,
    )


def _extended(values: np.ndarray, size: int, by: int) -> np.ndarray:
    extended = np.full(size, by, values.dtype)
    extended[: len(values)] = values
    return extended


def _blank(inputs: _Inputs, nobody: int) -> _Inputs:
    """Inputs of the same shapes that are no request's: what they yield goes to nobody."""
    blank = _Inputs(*(np.zeros_like(array) for array in inputs))
    bounds = np.minimum(np.arange(len(inputs.bounds), dtype=np.int32), len(inputs.ids))
    return blank._replace(
        slots=blank.slots - 1, lengths=blank.lengths + 1, owners=blank.owners + nobody,
        bounds=bounds,
    )  # fmt: skip
