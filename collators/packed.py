"""Packs, or plain lists of samples, to the flat batch that any HF causal LM takes.

    Pack  a a a a | b b | c c c     ─▶   input_ids      [1, T]
                                         labels         [1, T]   -100 at the head of a, b, c
                                         position_ids   [1, T]   0 1 2 3 0 1 0 1 2
                                         cu_seq_lens_*  [0 4 6 9]
                                         max_length_*   4        a Python int: no device sync
                                         use_cache      False    else stock masks lose boundaries

There is no attention mask: a 2-D one would switch off boundary detection in stock attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch

from ..packing import IGNORE_INDEX, Pack, Sample
from .row_layout import as_sample, lay_rows


class PackedCollator:
    """Collate one pack, several packs, or a list of samples, without padding.

    >>> batch = PackedCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 8, 9]], [[-100, 6, 7, -100, 9]])
    >>> batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]
    ([[0, 1, 2, 0, 1]], [0, 3, 5], 3)
    """

    def __init__(
        self,
        *,
        seq_idx: bool = False,
        fill: bool = False,
        fixed_sequences: int | None = None,
        max_length: int | None = None,
        stack: bool = False,
        mean: Literal["token", "sample"] = "token",
        pad_token_id: int = 0,
    ):
        """Choose the extras.

        seq_idx: number the sequences for Mamba-like layers.
        fill: T is always the budget: one more sequence, that counts nothing, fills a row up.
        fixed_sequences: all shapes constant, so that torch.compile builds one graph: rows are
            filled, and `cu_seq_lens` has room for this many sequences, the filler included.
        max_length: what `max_length` says under fixed shapes, no less than the longest sequence;
            left out, the budget, which is right for all and makes attention launch idle blocks.
        stack: several packs become rows [B, budget] instead of one longer row.
        mean: "sample" adds `loss_weights` that let every sample count the same, long or short;
            the tokens of a split one weigh what they would in one piece, but the first of each
            part counts nothing, so its parts together weigh a little less. The attached loss reads
            them (`nopad.trainer.loss.attach_loss`, or any of our front ends); a stock one does not.
        """
        if fixed_sequences is not None and fixed_sequences < 1:
            raise ValueError(f"fixed_sequences={fixed_sequences}: the filler needs a place")
        if max_length is not None and (fixed_sequences is None or max_length < 1):
            raise ValueError(
                f"max_length={max_length}, fixed_sequences={fixed_sequences}: it is the length "
                "that fixed shapes are made for, at least 1; leave it out elsewhere: what becomes "
                "of long samples is said by the data's overflow="
            )
        if not isinstance(pad_token_id, Integral) or pad_token_id < 0:
            raise ValueError(
                f"pad_token_id={pad_token_id!r}: any id of the vocabulary will do, 0 as well, for "
                "what fills rows up counts nothing"
            )
        if mean not in ("token", "sample"):
            raise ValueError(f"mean={mean!r}: the loss is a mean over 'token' or 'sample'")
        self.seq_idx = seq_idx
        self.fill = fill or stack or fixed_sequences is not None
        self.fixed_sequences = fixed_sequences
        self.max_length = max_length
        self.stack = stack
        self.mean = mean
        self.pad_token_id = int(pad_token_id)

    def __call__(self, packs: Pack | Sequence[Pack] | Sequence[Mapping | Sample]) -> dict[str, Any]:
        packs = [packs] if isinstance(packs, Pack) else self._as_packs(packs)
        # An empty pack still needs one token, or the model has nothing to run on.
        widths = [pack.budget if self.fill else len(pack.tokens) or 1 for pack in packs]
        rows, bounds, longest = lay_rows(packs, widths, self.pad_token_id, self.fixed_sequences)
        if self.stack:
            if len(set(widths)) > 1:
                raise ValueError(f"packs of the budgets {sorted(set(widths))} make no even rows")
            rows = rows.reshape(3, len(packs), -1)
        if self.fixed_sequences is not None:
            longest = self._fixed_length(longest, max(widths))
        cu_seq_lens = torch.from_numpy(bounds)
        batch: dict[str, Any] = {
            "input_ids": torch.from_numpy(rows[0]),
            "labels": torch.from_numpy(rows[1]),
            "position_ids": torch.from_numpy(rows[2]),
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": longest,
            "max_length_k": longest,
            "use_cache": False,
        }
        if self.seq_idx:
            numbers = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
            batch["seq_idx"] = torch.from_numpy(numbers.reshape(rows[0].shape))
        if self.mean == "sample":
            weights = sample_weights(
                rows[1].ravel(), bounds, _wholes(packs, widths, len(bounds) - 1)
            )
            batch["loss_weights"] = torch.from_numpy(weights.reshape(rows[1].shape))
        return batch

    def _fixed_length(self, longest: int, budget: int) -> int:
        fixed = self.max_length or budget
        if longest > fixed:
            raise ValueError(
                f"a sequence of {longest} tokens is longer than max_length={fixed}: "
                "the filler counts too; raise it, the budget is safe"
            )
        return fixed

    def _as_packs(self, rows: Sequence[Any]) -> Sequence[Pack]:
        if not len(rows):
            raise ValueError("an empty list cannot be collated: pass at least one sample or pack")
        if all(isinstance(row, Pack) for row in rows):
            return rows
        if self.fill:
            raise ValueError(
                "fill, stack and fixed_sequences fill rows up to the budget of their packs, and "
                "plain samples have none: pass packs"
            )
        samples = [as_sample(row) for row in rows]
        return [Pack.of(samples, budget=sum(len(sample) for sample in samples))]


def _wholes(packs: Sequence[Pack], widths: Sequence[int], sequences: int) -> np.ndarray:
    """int64 [sequences]: `Pack.wholes` of all packs, in the places that their sequences have."""
    wholes, at = np.zeros(sequences, np.int64), 0
    for pack, width in zip(packs, widths, strict=True):
        if pack.wholes is not None:
            wholes[at : at + len(pack.samples)] = pack.wholes
        at += len(pack.samples) + (len(pack.tokens) < width)
    return wholes


def sample_weights(
    labels: np.ndarray, bounds: np.ndarray, wholes: np.ndarray | int = 0
) -> np.ndarray:
    """float32 [T]: each counted token weighs one over the counted tokens of its sample.

    wholes: how many those are, for sequences that are parts; 0 for whole samples.

    >>> labels, bounds = np.array([IGNORE_INDEX, 6, 7, IGNORE_INDEX, 9]), np.array([0, 3, 5])
    >>> sample_weights(labels, bounds).tolist()
    [0.0, 0.5, 0.5, 0.0, 1.0]
    >>> sample_weights(labels, bounds, wholes=np.array([0, 4])).tolist()
    [0.0, 0.5, 0.5, 0.0, 0.25]
    """
    counted = labels != IGNORE_INDEX
    before = np.concatenate([[0], np.cumsum(counted)])
    per_sample = np.where(wholes, wholes, before[bounds[1:]] - before[bounds[:-1]])
    share = 1 / np.maximum(per_sample, 1, dtype=np.float32)
    return np.repeat(share, np.diff(bounds)) * counted
