"""Packs, or plain lists of samples, to the flat batch that any HF causal LM takes.

    Pack  a a a a | b b | c c c     ─▶   input_ids      [1, T]
                                         labels         [1, T]   -100 at the head of a, b, c
                                         position_ids   [1, T]   0 1 2 3 0 1 0 1 2
                                         cu_seq_lens_*  [0 4 6 9]
                                         max_length_*   4        a Python int: no device sync
                                         use_cache      False    else stock masks lose the boundaries

There is no attention mask: a 2-D one would switch off boundary detection in stock attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..packing import IGNORE, Pack, Sample


class PackedCollator:
    """Collate one pack, several packs, or a list of samples, without padding.

    >>> batch = PackedCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 8, 9]], [[-100, 6, 7, -100, 9]])
    >>> batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]
    ([[0, 1, 2, 0, 1]], [0, 3, 5], 3)

    `fixed_sequences=n` makes every shape constant, so that torch.compile builds one graph: T is
    filled up to the budget, `cu_seq_lens` to n + 1 entries, and `max_length` is the budget. The
    filler is one more sequence that counts nothing.
    """

    def __init__(
        self,
        *,
        seq_idx: bool = False,
        fixed_sequences: int | None = None,
        stack: bool = False,
        pad_token_id: int = 0,
    ):
        """Choose the extras.

        seq_idx: number the sequences for Mamba-like layers.
        fixed_sequences: constant shapes with room for this many sequences, the filler included.
        stack: several packs become rows [B, budget] instead of one longer row.
        """
        if fixed_sequences is not None and fixed_sequences < 1:
            raise ValueError(f"fixed_sequences={fixed_sequences}: at least the filler needs a place")
        self.seq_idx = seq_idx
        self.fixed_sequences = fixed_sequences
        self.stack = stack
        self.pad_token_id = pad_token_id

    def __call__(self, packs: Pack | Sequence[Pack] | Sequence[Mapping | Sample]) -> dict[str, Any]:
        packs = _as_packs(packs)
        even = self.stack or self.fixed_sequences is not None
        rows = [self._fill(pack, pack.budget if even else 1) for pack in packs]
        return self._batch(rows, sum(len(row.tokens) for row in rows))

    def _fill(self, pack: Pack, length: int) -> Pack:
        """Append one uncounted sequence up to `length` tokens; packs that long stay as they are."""
        missing = length - len(pack.tokens)
        if missing <= 0:
            return pack
        return Pack(
            tokens=np.append(pack.tokens, np.full(missing, self.pad_token_id)),
            labels=np.append(pack.labels, np.full(missing, IGNORE)),
            cu_seqlens=np.append(pack.cu_seqlens, np.int32(length)),
            budget=pack.budget,
            samples=np.append(pack.samples, -1),
            sources=np.append(pack.sources, np.int16(-1)),
            first_positions=np.append(pack.first_positions, 0),
        )

    def _batch(self, rows: list[Pack], total: int) -> dict[str, Any]:
        bounds, longest = self._bounds(rows, total)
        shape = (len(rows), -1) if self.stack else (1, -1)
        batch: dict[str, Any] = {
            "input_ids": _flat([row.tokens for row in rows]).view(shape),
            "labels": _flat([row.labels for row in rows]).view(shape),
            "position_ids": _flat([row.positions() for row in rows]).view(shape),
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
            "use_cache": False,
        }
        if self.seq_idx:
            numbers = [np.repeat(np.arange(len(row.lengths)), row.lengths) for row in rows]
            batch["seq_idx"] = _flat(numbers).to(torch.int32).view(shape)
        return batch

    def _bounds(self, rows: list[Pack], total: int) -> tuple[torch.Tensor, int]:
        """Concatenate the boundaries of all rows; with fixed shapes, repeat T at the end."""
        starts = np.cumsum([0] + [len(row.tokens) for row in rows[:-1]])
        inner = [row.cu_seqlens[1:] + start for row, start in zip(rows, starts, strict=True)]
        bounds = np.concatenate([[0], *inner]).astype(np.int32)
        if self.fixed_sequences is None:
            return torch.from_numpy(bounds), int(np.diff(bounds).max())
        if len(bounds) > self.fixed_sequences + 1:
            raise ValueError(
                f"a batch holds {len(bounds) - 1} sequences, but fixed_sequences="
                f"{self.fixed_sequences}: raise it, the budget divided by the shortest sample is safe"
            )
        fixed = np.full(self.fixed_sequences + 1, total, np.int32)
        fixed[: len(bounds)] = bounds
        return torch.from_numpy(fixed), max(row.budget for row in rows)


def _as_packs(packs: Any) -> list[Pack]:
    if isinstance(packs, Pack):
        return [packs]
    packs = list(packs)
    if packs and all(isinstance(pack, Pack) for pack in packs):
        return packs
    samples = [as_sample(row) for row in packs]
    if not samples:
        raise ValueError("an empty list cannot be collated: pass at least one sample or pack")
    return [Pack.of(samples, budget=sum(len(sample) for sample in samples))]


def as_sample(row: Sample | Mapping) -> Sample:
    """Read a trainer's feature dict as a sample."""
    if isinstance(row, Sample):
        return row
    if "input_ids" not in row:
        raise ValueError(f"a row needs `input_ids`, got the keys {sorted(row)}")
    return Sample(np.asarray(row["input_ids"]), row.get("labels"))


def _flat(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
