"""Choose sample lengths of test rows that reveal whether packing changes a model's results.

The first row is about as long as the budget: it uses the kernels that training uses, and reveals
limits that the config does not state, such as an expert capacity. Another row is short, as a last
pack may be.

A chunk, a window, a number of selected keys or an original context only matters to rows and samples
that exceed it. Each such length that a model names gets a row in which a sample lies across it, and
one with a sample that is longer.
"""

from __future__ import annotations

from typing import Any

from .sequence_limits import rope_parameters, rotary_limit

SHORT_ROW = (6, 9, 5)
_OVERHANG = 16
_ORIGINAL = "original_max_position_embeddings"
_LANDMARKS = ("window", "chunk", "local", "topk", "top_k", "block_size", "stride", _ORIGINAL)
_NO_LANDMARKS = ("num_", "layer", "moe", "expert", "ffn", "token_id")
_SHORTEST = 8
"""Shorter ones are exceeded by any row."""


def probe_rows(
    config: Any, budget: int, longest: int, max_samples: int | None = None
) -> dict[int, list[list[int]]]:
    """Return the lengths of the samples of each row, by the length that they exceed; 0: none.

    budget, longest: tokens that a row and a sample may have.
    max_samples: samples that a row may have; None: any number.

    >>> config = type("Config", (), {"sliding_window": 64})
    >>> probe_rows(config, budget=128, longest=128)
    {0: [[64, 9, 32, 5, 10], [6, 9, 5]], 64: [[61, 9, 5], [6, 80, 9]]}
    """
    max_samples, longest = max_samples or budget, min(longest, budget)
    first, second, third = (max(1, min(n, longest, budget // 3)) for n in SHORT_ROW)
    long_row = [
        *_pieces(budget // 2, longest), second, *_pieces(budget // 4, longest), third,
        *_pieces(budget // 12, longest),
    ]  # fmt: skip
    rows = {0: [row[:max_samples] for row in (_cut(long_row, budget), [first, second, third])]}
    for length in landmark_lengths(config):
        if length < budget:
            across = [*_pieces(length - 3, longest), second, third]
            beyond = [first, min(length + _OVERHANG, longest), second]
            wanted = [across, beyond] if longest > length else [across]
            fitting = [_cut(row, budget) for row in wanted]
            rows[length] = [row for row in fitting if len(row) <= max_samples]
    return rows


def _pieces(total: int, longest: int) -> list[int]:
    """Cut a number of tokens into samples.

    >>> _pieces(61, 25)
    [25, 25, 11]
    """
    return [min(longest, total - start) for start in range(0, total, longest)]


def _cut(row: list[int], budget: int) -> list[int]:
    """Cut a row off at the budget.

    >>> _cut([61, 9, 5], 66)
    [61, 5]
    """
    starts = [sum(row[:i]) for i in range(len(row))]
    cut = [min(n, budget - start) for n, start in zip(row, starts, strict=True)]
    return [n for n in cut if n > 0]


def landmark_lengths(config: Any) -> list[int]:
    """Return the lengths that a model's config names and at which attention may change.

    Found by words, so that types we have never seen are covered: a length too many only costs time.

    >>> landmark_lengths(type("Config", (), {"sliding_window": 512, "vocab_size": 32000}))
    [512]
    """
    named = {name: getattr(config, name, None) for name in dir(config) if _is_landmark(name)}
    values = [*named.values(), *(p.get(_ORIGINAL) for p in rope_parameters(config))]
    limit = rotary_limit(config)
    values += [] if limit is None else [limit.length]
    return sorted({n for n in values if type(n) is int and n >= _SHORTEST})


def _is_landmark(name: str) -> bool:
    is_named = any(word in name for word in _LANDMARKS)
    return is_named and not any(word in name for word in _NO_LANDMARKS)
