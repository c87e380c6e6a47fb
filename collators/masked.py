"""`MaskedCollator`: packs to a batch for a masked LM; some tokens of each document are replaced.

    input_ids  [ cls  the  [M]  sat  sep | cls  dogs  run  sep ]
    labels     [  .    .   cat   .    .  |  .    .    .    .   ]        . = -100

Which tokens is a function of the seed, the index of the pack in the run and the document's place in
it. So a resumed run, and one with other ranks or workers, has the same masks; a document has other
masks in the next epoch, because it is in another pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..packing import IGNORE_INDEX, Pack, Sample
from .packed import PackedCollator, is_integer


class MaskedCollator(PackedCollator):
    """Collate packs for a masked LM: 80 % of the chosen tokens become the mask, 10 % another token.

    Special tokens are never chosen, nor put in the place of another. Rows without a pack draw from
    torch's generator, as the collator of Transformers does.

    Args:
        tokenizer: of the model, with a mask token.
        probability: of a token to be chosen.
        seed: determines the masks.
        options: options of `PackedCollator`, except for `mean`.
    """

    def __init__(self, tokenizer: Any, *, probability: float = 0.15, seed: int = 0, **options: Any):
        super().__init__(**options)
        if getattr(tokenizer, "mask_token_id", None) is None:
            raise ValueError("the tokenizer has no mask token: pass that of a masked LM")
        if not 0 < probability < 1:
            raise ValueError(f"probability={probability}: pass a number between 0 and 1")
        if not is_integer(seed, 0):
            raise ValueError(f"seed={seed!r}: pass an integer of at least 0")
        if self.mean != "token":
            raise ValueError(f"mean={self.mean!r}: a masked LM has the mean over chosen tokens")
        self.probability, self.seed = probability, int(seed)
        self.mask_token_id = int(tokenizer.mask_token_id)
        self.special_ids = np.array(sorted(tokenizer.all_special_ids), np.int64)
        self.other_ids = np.setdiff1d(np.arange(len(tokenizer)), self.special_ids)
        """Ids that replace tokens: RoBERTa would not count the position of padding."""

    def __call__(self, packs: Pack | Sequence[Pack] | Sequence[Mapping | Sample]) -> dict[str, Any]:
        packs = [packs] if isinstance(packs, Pack) else self._as_packs(packs)
        batch = self.unmasked(packs)
        ids = batch["input_ids"].numpy()
        labels, row, start = np.full(ids.size, IGNORE_INDEX), ids.reshape(-1), 0
        for pack in packs:
            width = pack.budget if self.pad_to_budget else len(pack.tokens) or 1
            for number in range(len(pack.samples)):
                begin, end = (start + int(at) for at in pack.cu_seqlens[number : number + 2])
                self._mask(row[begin:end], labels[begin:end], self._generator(pack, number))
            start += width
        labels = labels.reshape(ids.shape)
        weights = (labels != IGNORE_INDEX).astype(np.float32)
        return batch | {
            "labels": torch.from_numpy(labels),
            "loss_weights": torch.from_numpy(weights),
        }

    def unmasked(self, packs: Any) -> dict[str, Any]:
        """Return the batch of packs with their own tokens."""
        return super().__call__(packs)

    def _generator(self, pack: Pack, number: int) -> np.random.Generator:
        if pack.index < 0:
            return np.random.default_rng(int(torch.randint(1 << 62, ())))
        return np.random.default_rng([self.seed, pack.index, number])

    def _mask(self, ids: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> None:
        """Replace tokens of one document in place, and set the labels of those."""
        chosen = (rng.random(len(ids)) < self.probability) & ~np.isin(ids, self.special_ids)
        kind, other = rng.random(len(ids)), rng.choice(self.other_ids, len(ids))
        labels[chosen] = ids[chosen]
        ids[chosen & (kind < 0.8)] = self.mask_token_id
        is_random = chosen & (kind >= 0.8) & (kind < 0.9)
        ids[is_random] = other[is_random]
