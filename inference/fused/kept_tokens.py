"""`KeptTokens`: tokens whose logits are read; the last layer computes its output for them alone.

    step          [ a a a a a a b c c c c c ]
    last layer    keys and values of all tokens
                  queries, output and MLP of  a's last, b and c's last

The last layer's output of a prompt's earlier tokens is never read: with 16 layers, about 6 % of a
prompt's work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention import Pages, Varlen


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """R of the T tokens of a step."""

    indices: Tensor
    """int64 [R]."""

    @classmethod
    def of(cls, logits_to_keep: Tensor | int, varlen: Varlen) -> KeptTokens | None:
        """Return the tokens that logits are computed of; None if they are half of all or more."""
        assert varlen.pages is not None
        if isinstance(logits_to_keep, int):
            return None
        few = 2 * len(logits_to_keep) <= len(varlen.pages.kv_slots)
        return cls(logits_to_keep) if few else None

    def varlen(self, varlen: Varlen, token_lengths: Tensor) -> Varlen:
        """Return a step in which each of them is the only query of a sequence.

        token_lengths: int32 [T], the keys of each token's sequence up to itself.
        """
        pages, count = varlen.pages, len(self.indices)
        assert pages is not None
        device = self.indices.device
        owners = torch.searchsorted(varlen.cu_seqlens, self.indices.to(torch.int32), right=True)
        owners = (owners - 1).clamp_(max=len(pages.table) - 1)  # padding tokens have no owner
        own_pages = Pages(
            pages.cache,
            pages.table[owners],
            token_lengths[self.indices],
            pages.kv_slots[self.indices],
            pages.max_length,
        )
        return Varlen(torch.arange(count + 1, dtype=torch.int32, device=device), 1, own_pages)
