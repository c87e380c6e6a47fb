"""`PackedCollator`: packs or samples to the flat batch that any Hugging Face causal LM accepts.

    Pack  a a a a | b b | c c c     ─▶   input_ids      [1, T]
                                         labels         [1, T]   -100 at the first token of a, b, c
                                         position_ids   [1, T]   0 1 2 3 0 1 0 1 2
                                         cu_seq_lens_*  [0 4 6 9]
                                         max_length_*   4        a Python int: no device sync
                                         use_cache      False    True: stock masks lose boundaries

There is no attention mask: a 2-D one would disable boundary detection in stock attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch

from ..packing import IGNORE_INDEX, MAX_TOKEN_ID, Pack, Sample, check_flags, jit
from .document_labels import document_labels
from .features import as_samples
from .media_inputs import media_inputs
from .sample_weights import parent_label_counts, sample_weights


class PackedCollator:
    """Collate one pack, several packs, or a list of samples, without padding.

    Samples are isolated with attn_implementation="nopad" and in nopad's trainers. With stock
    attention in other loops, samples attend to each other in model types that do not pass positions
    to their masks (GPT-OSS, OPT, Falcon, BLOOM, MPT, ...): check yours with `nopad doctor`.

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
        pad_to_budget: bool = False,
        fixed_sequences: int | None = None,
        max_length: int | None = None,
        stack: bool = False,
        mean: Literal["token", "sample"] = "token",
        pad_token_id: int = 0,
    ):
        """Choose optional outputs and shapes.

        Args:
            seq_idx: number the sequences for Mamba-like layers.
            pad_to_budget: pad every row to the budget with one more sequence, which the loss
                ignores.
            fixed_sequences: make all shapes constant, so that torch.compile builds one graph: rows
                are padded to the budget, and `cu_seq_lens` has this many sequences, including the
                padding sequence.
            max_length: the value of `max_length_*` with fixed shapes, at least the longest
                sequence. The default, the budget, is always correct, but attention launches idle
                blocks.
            stack: stack several packs as rows [B, budget] instead of one longer row.
            mean: "sample" adds `loss_weights` that give every sample the same weight. Tokens of a
                split sample weigh as much as unsplit, but the first token of each part is not a
                label, so the parts together weigh slightly less. The attached loss
                (`nopad.attach_loss`, or any front end) uses the weights; stock losses ignore them.
            pad_token_id: id of the padding with fixed shapes; the loss ignores it.
        """
        check_flags(seq_idx=seq_idx, pad_to_budget=pad_to_budget, stack=stack)
        if fixed_sequences is not None and not is_integer(fixed_sequences, 1):
            raise ValueError(f"fixed_sequences={fixed_sequences!r}: the padding sequence needs one")
        if max_length is not None and (fixed_sequences is None or not is_integer(max_length, 1)):
            raise ValueError(
                f"max_length={max_length}, fixed_sequences={fixed_sequences}: max_length is the "
                "sequence length of fixed shapes, at least 1; omit it otherwise; "
                "use PackedDataset(overflow=...) for long samples"
            )
        check_pad_token_id(pad_token_id)
        if mean not in ("token", "sample"):
            raise ValueError(f"mean={mean!r}: pass 'token' or 'sample'")
        self.seq_idx = seq_idx
        self.pad_to_budget = pad_to_budget or stack or fixed_sequences is not None
        self.fixed_sequences = fixed_sequences
        self.max_length = max_length
        self.stack = stack
        self.mean = mean
        self.pad_token_id = int(pad_token_id)

    def __call__(self, packs: Pack | Sequence[Pack] | Sequence[Mapping | Sample]) -> dict[str, Any]:
        packs = [packs] if isinstance(packs, Pack) else self._as_packs(packs)
        # An empty pack still needs one token for the model to run on.
        widths = [pack.budget if self.pad_to_budget else len(pack.tokens) or 1 for pack in packs]
        rows, bounds, longest = lay_out_rows(packs, widths, self.pad_token_id, self.fixed_sequences)
        if self.stack:
            if len(set(widths)) > 1:
                raise ValueError(f"packs of the budgets {sorted(set(widths))} cannot be stacked")
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
        if any(pack.targets is not None for pack in packs):
            batch |= document_labels(packs, widths, len(bounds) - 1, rows[0].shape)
        labels = batch["labels"].numpy()
        if self.mean == "sample" and labels.shape == rows[1].shape and labels.dtype == np.int64:
            label_counts = parent_label_counts(packs, widths, len(bounds) - 1)
            weights = sample_weights(labels.ravel(), bounds, label_counts)
            batch["loss_weights"] = torch.from_numpy(weights.reshape(labels.shape))
        return batch | media_inputs(packs, widths, batch["position_ids"])

    def _fixed_length(self, longest: int, budget: int) -> int:
        fixed = self.max_length or budget
        if longest > fixed:
            raise ValueError(
                f"a sequence of {longest} tokens is longer than max_length={fixed}: "
                "the padding sequence counts too; raise it, the budget always suffices"
            )
        return fixed

    def _as_packs(self, rows: Sequence[Any]) -> Sequence[Pack]:
        if not len(rows):
            raise ValueError("an empty list cannot be collated: pass at least one sample or pack")
        if all(isinstance(row, Pack) for row in rows):
            return rows
        if self.pad_to_budget:
            raise ValueError(
                "pad_to_budget, stack and fixed_sequences pad rows to the budget of their packs, "
                "but samples have no budget: pass packs"
            )
        samples = as_samples(rows)
        return [Pack.of(samples, budget=sum(len(sample) for sample in samples))]


def is_integer(value: Any, minimum: int) -> bool:
    """Return whether a value is an integer of Python or NumPy, and at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return minimum <= int(value) <= MAX_TOKEN_ID


def check_pad_token_id(pad_token_id: Any) -> None:
    """Raise for a value that cannot be a token id."""
    if not is_integer(pad_token_id, 0):
        raise ValueError(
            f"pad_token_id={pad_token_id!r}: pass any id of the vocabulary, such as 0; the loss "
            "ignores padding"
        )


def lay_out_rows(
    packs: Sequence[Pack],
    widths: Sequence[int],
    pad_token_id: int,
    max_sequences: int | None = None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Concatenate packs, each padded to its width by one sequence that the loss ignores.

    Returns tokens, labels and positions in one array [3, 1, T], the boundaries, and the length of
    the longest sequence. With `max_sequences`, empty sequences are appended up to that number.

    >>> pack = Pack.of([Sample(np.array([5, 6, 7]))], budget=5)
    >>> rows, cu_seq_lens, longest = lay_out_rows([pack], [5], pad_token_id=0)
    >>> rows[:, 0].tolist(), cu_seq_lens.tolist(), longest
    ([[5, 6, 7, 0, 0], [-100, 6, 7, -100, -100], [0, 1, 2, 0, 1]], [0, 3, 5], 3)
    """
    sequences = total = 0
    for pack, width in zip(packs, widths, strict=True):
        sequences += len(pack.samples) + (len(pack.tokens) < width)
        total += width
    if max_sequences is not None and sequences > max_sequences:
        raise ValueError(
            f"a batch has {sequences} sequences, but fixed_sequences={max_sequences}: raise it, "
            "budget / shortest sample always suffices"
        )
    rows = np.empty((3, 1, total), np.int64)
    cu_seq_lens = np.empty((max_sequences or sequences) + 1, np.int32)
    end = sequence = longest = 0
    for pack, width in zip(packs, widths, strict=True):
        tokens, labels = pack.tokens, pack.explicit_labels
        start, end = end, end + width
        sequence, longest = _copy_pack(
            tokens,
            tokens if labels is None else labels,
            pack.cu_seqlens,
            pack.first_positions,
            (start, end, sequence, longest, pad_token_id),
            rows,
            cu_seq_lens,
        )
    return rows, cu_seq_lens, longest


@jit
def _copy_pack(tokens, labels, cu_seqlens, first_positions, offsets, rows, cu_seq_lens):
    """Copy one pack; return the index of its last boundary, and the longest sequence so far."""
    start, end, sequence, longest, pad_token_id = offsets
    used = len(tokens)
    cu_seq_lens[sequence] = start
    row_ids, row_labels = rows[0, 0, start:end], rows[1, 0, start:end]
    row_positions = rows[2, 0, start:end]
    for t in range(used):  # a loop, since assigning slices takes three times as long
        row_ids[t] = tokens[t]
        row_labels[t] = labels[t]
    for n in range(len(first_positions)):
        begin, stop = np.int64(cu_seqlens[n]), np.int64(cu_seqlens[n + 1])
        row_labels[begin] = IGNORE_INDEX
        positions, first = row_positions[begin:stop], first_positions[n]
        for t in range(len(positions)):
            positions[t] = first + t
        sequence += 1
        cu_seq_lens[sequence] = start + stop
        longest = max(longest, stop - begin)
    if start + used < end:
        for t in range(used, end - start):
            row_ids[t], row_labels[t], row_positions[t] = pad_token_id, IGNORE_INDEX, t - used
        sequence += 1
        cu_seq_lens[sequence] = end
        longest = max(longest, end - start - used)
    cu_seq_lens[sequence + 1 :] = end
    return sequence, longest
