"""Sequence parallelism: split a row over the ranks of a group, and join losses and outputs.

    labels of the whole row ─▶ shifted ─┐
    ids, positions, weights ────────────┼─▶ padded to a multiple of the ranks ─▶ this rank's tokens
    cu_seq_lens ─▶ Varlen of the whole row, with the group ─▶ attention

Labels are shifted before the row is cut, so the last token of a shard is trained on the first label
of the next. Padding is a separate document without labels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ...attention import Varlen, check_supported
from ...attention.hf import ATTN_IMPLEMENTATION, drops_kwargs

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class RowShards:
    """Cuts rows for this rank of a group, and puts results together again."""

    def __init__(self, group: Any):
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def split(self, values: Tensor, fill: float = 0) -> Tensor:
        """Return this rank's part of a row [..., B, T], flattened: [..., 1, B*T / ranks]."""
        row = values.flatten(-2)
        size = -(-row.shape[-1] // self.ranks)
        row = pad(row, (0, size * self.ranks - row.shape[-1]), value=fill)
        return row[..., self.rank * size : (self.rank + 1) * size].unsqueeze(-2)

    def split_inputs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a model's forward for this rank's part of the row."""
        _check_inputs(kwargs)
        tokens, bounds = kwargs["input_ids"].numel(), kwargs["cu_seq_lens_q"]
        padded = -(-tokens // self.ranks) * self.ranks
        if padded > tokens:
            bounds = pad(bounds, (0, 1), value=padded)
        longest = max(int(kwargs["max_length_q"]), padded - tokens)
        others = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        ids, positions = self.split(kwargs["input_ids"]), self.split(kwargs["position_ids"])
        varlen = Varlen(bounds, longest, group=self.group)
        return {**others, "input_ids": ids, "position_ids": positions, "varlen": varlen}

    def join(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Return the whole row of a tensor [1, T / ranks, ...], on all ranks, without gradients."""
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part.detach().contiguous(), group=self.group)
        row = torch.cat(parts, 1)[0, : shape.numel()]
        return row.view(*shape, *part.shape[2:])

    def join_outputs(self, outputs: Any, losses: Any, shape: torch.Size) -> tuple[Any, Tensor]:
        """Return the outputs and token losses of the whole row; logits only outside of training."""
        fields = {**outputs, "loss": self.mean(outputs.loss)}
        logits = fields.pop("logits", None)
        if logits is not None and not torch.is_grad_enabled():
            fields["logits"] = self.join(logits, shape)
        # Losses are at the position of their label, and were cut at that of its prediction.
        losses = self.join(losses.roll(-1, -1), shape).roll(1, -1)
        return type(outputs)(**fields), losses

    def join_rows(self, part: Tensor, count: int) -> Tensor:
        """Return the first `count` rows of a tensor [T / ranks, N] of all ranks, with gradients."""
        return _JoinedRows.apply(part, self.group, self.ranks, self.rank)[:count]

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean over the ranks; its gradient is that of this rank's own loss.

        Trainers average gradients over these ranks too, and so sum the parts of the row.
        """
        return _GroupMean.apply(loss, self.group, self.ranks)


def check_shardable(model: Any) -> None:
    """Raise if the rows of a model cannot be spread over ranks."""
    attention = model.config.get_text_config()._attn_implementation
    if attention != ATTN_IMPLEMENTATION:
        raise ValueError(
            f"sequence parallelism needs attn_implementation={ATTN_IMPLEMENTATION!r}, but the "
            f"model has {attention!r}: call model.set_attn_implementation"
            f"({ATTN_IMPLEMENTATION!r})"
        )
    check_supported(model)
    if drops_kwargs(model):
        raise ValueError(
            f"{model.config.model_type} does not pass keyword arguments to its attention, which "
            "sequence parallelism needs: use FSDP or tensor parallelism"
        )


def _check_inputs(kwargs: dict[str, Any]) -> None:
    missing = [name for name in ("input_ids", "position_ids", *BOUNDARIES[::2])
               if kwargs.get(name) is None]  # fmt: skip
    if missing:
        raise ValueError(
            f"sequence parallelism needs {', '.join(missing)} by name: pass the batches of "
            "PackedCollator"
        )
    known = {"input_ids", "position_ids", *BOUNDARIES}
    for name, value in kwargs.items():
        if torch.is_tensor(value) and name not in known:
            raise ValueError(
                f"{name} cannot be spread over sequence-parallel ranks: omit it, or train without "
                "sequence parallelism"
            )


class _GroupMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: Any, ranks: int) -> Tensor:
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total / ranks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _JoinedRows(torch.autograd.Function):
    """All-gather of rows.

    Every rank computes the same loss from them, so a rank's gradient is the slice of its own rows,
    times the number of ranks, since trainers average gradients over ranks.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, ranks: int, rank: int) -> Tensor:
        ctx.ranks, ctx.rows = ranks, slice(rank * len(part), (rank + 1) * len(part))
        parts = [torch.empty_like(part) for _ in range(ranks)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.rows] * ctx.ranks, None, None, None
