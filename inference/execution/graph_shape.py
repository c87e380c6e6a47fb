"""The few shapes in which CUDA graphs are captured, and the padding of a step to one of them.

    decode   one token per request      tokens = requests, rounded up; a row of logits for each
    mixed    prompts among decodes      tokens and requests are rounded up one by one

A padding row of a decode step is a request of one token that is written nowhere. The padding tokens
of a mixed step belong to no request: they pass through the layers, and nothing reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from ...attention.backends import forced_paged_backend
from ..scheduling.step import Step

CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Rows of captured decode steps. Above come multiples of 64, the rows of the smallest tile: TMA is
slow where the last of several tiles is not full."""
MIXED_TOKENS = (
    *(64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
    *(1152, 1280, 1536, 1792, 2048, 2304, 2560, 3072, 3584, 4096),
)
"""Tokens of captured steps with prompts; the kernels of larger steps outlast their launches."""
_MIXED_SEQS = (16, 64, 128, 256)
_MIXED_WIDTH = 8
"""Columns of the page table in the smallest mixed steps."""
_DECODE_WIDTH = 4
"""Columns of the page table in the smallest decode steps."""


class GraphShape(NamedTuple):
    """What a captured step is fixed to."""

    backend: str | None
    """Attention backend forced by name."""
    mixed: bool
    num_tokens: int
    num_seqs: int
    width: int
    """Columns of the page table."""

    def holds(self, other: GraphShape) -> bool:
        """Whether a step of the other shape can run in this one."""
        same_kind = self[:2] == other[:2]
        return same_kind and all(a >= b for a, b in zip(self[2:], other[2:], strict=True))


def capture_size(batch_size: int) -> int:
    """Return the smallest capture size that holds `batch_size` rows.

    >>> [capture_size(n) for n in (1, 3, 20, 65, 257)]
    [1, 4, 32, 128, 320]
    """
    if batch_size > CAPTURE_SIZES[-1]:
        return -(-batch_size // 64) * 64
    return CAPTURE_SIZES[bisect_left(CAPTURE_SIZES, batch_size)]


def capture_sizes(max_batch_size: int) -> list[int]:
    """Return all capture sizes up to the one that holds `max_batch_size` rows.

    >>> capture_sizes(5)
    [1, 2, 4, 8]
    """
    return sorted({capture_size(count) for count in range(1, max_batch_size + 1)})


def is_decode_only(step: Step) -> bool:
    """Return whether every request of a step runs one token and samples one."""
    alike = len(step.sampled_requests) == len(step.requests) == len(step.logits_indices)
    return step.max_query_len == 1 and alike


def step_shape(step: Step) -> GraphShape | None:
    """Return the smallest shape that holds a step; None if it is too large for a graph."""
    backend, num_pages = forced_paged_backend(), step.page_table.shape[1]
    if is_decode_only(step):
        size = capture_size(len(step.requests))
        return GraphShape(backend, False, size, size, _decode_width(num_pages))
    num_seqs = mixed_seqs(max(len(step.requests), len(step.logits_indices)))
    num_tokens = mixed_tokens(max(len(step.token_ids), num_seqs))
    if num_tokens is None:
        return None
    width = _MIXED_WIDTH
    while width < num_pages:
        width *= 4
    return GraphShape(backend, True, num_tokens, num_seqs, width)


def shapes_ahead(max_num_seqs: int, max_num_tokens: int, max_pages: int) -> list[GraphShape]:
    """Return the shapes of steps of short requests: mixed ones, the largest first, then decodes.

    The first has all the memory that mixed graphs share. Decode graphs share little: if memory is
    short, it suffices for many small ones. max_pages: those of the longest sequence.

    >>> shapes = shapes_ahead(64, max_num_tokens=1000, max_pages=32)
    >>> len(shapes), shapes[0]
    (38, GraphShape(backend=None, mixed=True, num_tokens=1024, num_seqs=64, width=8))
    >>> shapes[-1]
    GraphShape(backend=None, mixed=False, num_tokens=64, num_seqs=64, width=8)
    """
    backend, sizes = forced_paged_backend(), capture_sizes(max_num_seqs)
    most = mixed_tokens(max_num_tokens) or MIXED_TOKENS[-1]
    mixed = [
        GraphShape(backend, True, num_tokens, num_seqs, _MIXED_WIDTH)
        for num_tokens in reversed(MIXED_TOKENS)
        for num_seqs in sorted({mixed_seqs(size) for size in sizes}, reverse=True)
        if num_seqs <= num_tokens <= most
    ]
    decodes = [
        GraphShape(backend, False, size, size, width)
        for size in sizes
        for width in sorted({_decode_width(1), _decode_width(min(max_pages, _MIXED_WIDTH))})
        if size <= _MIXED_SEQS[-1]
    ]
    return mixed + decodes


def _decode_width(num_pages: int) -> int:
    return _DECODE_WIDTH << ((num_pages - 1) // _DECODE_WIDTH).bit_length()


def mixed_tokens(count: int) -> int | None:
    """Return the tokens of the smallest mixed graph for a step; None if there is none.

    >>> [mixed_tokens(n) for n in (2, 65, 4096, 4097)]
    [64, 128, 4096, None]
    """
    return MIXED_TOKENS[bisect_left(MIXED_TOKENS, count)] if count <= MIXED_TOKENS[-1] else None


def mixed_seqs(count: int) -> int:
    """Return how many requests and rows of logits a mixed graph for a step has.

    >>> [mixed_seqs(n) for n in (1, 17, 256, 300)]
    [16, 64, 256, 512]
    """
    if count > _MIXED_SEQS[-1]:
        return -(-count // 256) * 256
    return _MIXED_SEQS[bisect_left(_MIXED_SEQS, count)]


class GraphArrays(NamedTuple):
    """The inputs of a graph on the host."""

    ids: np.ndarray
    positions: np.ndarray
    kv_slots: np.ndarray
    seq_lens: np.ndarray
    rows: np.ndarray
    """Where the token of each row of logits is kept for the next step."""
    page_table: np.ndarray
    cu_seqlens: np.ndarray
    logits_indices: np.ndarray
    slot: np.ndarray
    """Where the host reads the tokens (`StepBuffers`); -1: nowhere."""


def pad_step(step: Step, shape: GraphShape, padding_row: int, slot: int) -> GraphArrays:
    """Return a step in the shape of its graph; `padding_row`: where tokens are not kept."""
    arrays = blank_arrays(shape, padding_row)
    arrays.slot[0] = slot
    num_tokens, num_seqs = len(step.token_ids), len(step.requests)
    arrays.ids[:num_tokens], arrays.positions[:num_tokens] = step.token_ids, step.positions
    arrays.kv_slots[:num_tokens] = step.kv_slots
    arrays.seq_lens[:num_seqs] = step.seq_lens
    arrays.rows[: len(step.sampled_rows)] = step.sampled_rows
    arrays.page_table[:num_seqs, : step.page_table.shape[1]] = step.page_table
    if shape.mixed:
        arrays.cu_seqlens[: num_seqs + 1] = step.cu_seqlens
        arrays.cu_seqlens[num_seqs + 1 :] = num_tokens
        # Padding rows of logits take a token with few keys: each is attended once more.
        arrays.logits_indices[:] = arrays.positions.argmin()
        arrays.logits_indices[: len(step.logits_indices)] = step.logits_indices
    return arrays


def blank_arrays(shape: GraphShape, padding_row: int) -> GraphArrays:
    """Return the arrays of a step that consists of padding."""
    _, mixed, num_tokens, num_seqs, width = shape
    return GraphArrays(
        ids=np.zeros(num_tokens, np.int64),
        positions=np.zeros(num_tokens, np.int64),
        kv_slots=np.full(num_tokens, -1, np.int64),
        seq_lens=np.ones(num_seqs, np.int32),
        rows=np.full(num_seqs, padding_row, np.int64),
        page_table=np.zeros((num_seqs, width), np.int32),
        cu_seqlens=np.zeros(num_seqs + 1, np.int32)
        if mixed
        else np.arange(num_seqs + 1, dtype=np.int32),
        logits_indices=np.zeros(num_seqs, np.int64),
        slot=np.full(1, -1, np.int64),
    )
