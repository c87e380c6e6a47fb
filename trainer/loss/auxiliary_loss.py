"""The auxiliary loss of a mixture of experts, as part of the loss of an optimizer step.

    loss of a step  =  Σ over its batches of  (labels of the batch / labels of the step)
                         · (mean of its token losses + coefficient · its auxiliary loss)

The auxiliary loss of a step is the mean over its label tokens: the auxiliary loss of a batch weighs
as much as its cross-entropy. The loss of a step is therefore the token mean of the losses that the
model returns for each batch alone, independent of accumulation and ranks. The weight depends only
on `num_items_in_batch`, which every front end already scales for the cross-entropy, and an empty
batch has weight 0.

The auxiliary loss of a batch is the model's own function of its router logits, over all tokens of
documents that have a label, hence not over padding. If ranks share a row, it is over the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...attention.hf import has_router_logits
from ...packing import IGNORE_INDEX
from .sequence_parallel import RowShards


@dataclass(slots=True)
class _Batch:
    """The batch of the current forward."""

    weight: Tensor
    """Sum of the loss weights of its labels; `weight / divisor` is its share of the step."""
    divisor: Any
    mask: Tensor | None
    """The tokens that count for the auxiliary loss; None: the model decides."""
    num_tokens: int
    """Of the whole row."""
    shards: RowShards | None
    cross_entropy: Tensor | None = None
    is_mask_taken: bool = False


class AuxiliaryLoss:
    """Scales the auxiliary loss of one model; two hooks of its base model select the tokens."""

    def __init__(self, model: Any):
        self._model = model
        self._batch: _Batch | None = None
        self._hooks: list[Any] = []
        body = model.base_model
        has_lm_head = model.get_output_embeddings() is not None  # classifiers add no such loss
        self._has_router = body is not model and has_lm_head and has_router_logits(model)
        if self._has_router:
            self._hooks = [
                body.register_forward_pre_hook(self._take_mask, with_kwargs=True),
                body.register_forward_hook(self._join_rows),
            ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(
        self,
        kwargs: dict,
        targets: Tensor,
        weights: Tensor | None,
        divisor: Any,
        shards: RowShards | None,
    ) -> None:
        """Note the whole batch, before its row is spread over ranks."""
        if not self._has_router or not self._is_wanted(kwargs):
            return
        if torch.is_grad_enabled():
            _refuse_reentrance(self._model)
        mask, bounds = None, kwargs.get("cu_seq_lens_q")
        if bounds is not None and kwargs.get("attention_mask") is None:
            mask = _counted_tokens(targets, bounds)
        weight = sum_weights(targets, weights)
        self._batch = _Batch(weight, divisor, mask, targets.numel(), shards)

    def end(self) -> None:
        self._batch = None

    def inputs(self, kwargs: dict) -> dict:
        """Return the arguments of the model, with the mask for its auxiliary loss."""
        if self._batch is None or self._batch.mask is None:
            return kwargs
        return {**kwargs, "attention_mask": self._batch.mask}

    def hold(self, cross_entropy: Tensor) -> Tensor:
        """Keep the cross-entropy; return the 0 that the model adds its auxiliary loss to."""
        if self._batch is None:
            return cross_entropy
        self._batch.cross_entropy = cross_entropy
        return torch.zeros_like(cross_entropy)

    def scale(self, fields: dict) -> Tensor | None:
        """Replace both losses among the fields of the output by shares of the step.

        Returns the share of the auxiliary loss, detached; None if the model has none.
        """
        batch = self._batch
        if batch is None:
            return None
        if batch.cross_entropy is None:
            raise ValueError(
                f"{type(self._model).__name__} does not call self.loss_function, so its auxiliary "
                "loss would be omitted: train with output_router_logits=False"
            )
        assert batch.mask is None or batch.is_mask_taken, "the layers have seen the mask"
        share = batch.weight.to(batch.cross_entropy.dtype) / batch.divisor
        fields["loss"] = batch.cross_entropy + share * fields["loss"]
        if "aux_loss" not in fields:  # a type that may have experts, without any
            return None
        fields["aux_loss"] = share * fields["aux_loss"]
        return fields["aux_loss"].detach()

    def _is_wanted(self, kwargs: dict) -> bool:
        wanted, config = kwargs.get("output_router_logits"), self._model.config.get_text_config()
        return config.output_router_logits if wanted is None else wanted

    def _take_mask(self, body: Any, args: Any, kwargs: dict) -> tuple[Any, dict] | None:
        """Keep the mask from the layers, which know the documents by their boundaries."""
        if self._batch is None or self._batch.mask is None:
            return None
        self._batch.is_mask_taken = True
        return args, {**kwargs, "attention_mask": None}

    def _join_rows(self, body: Any, args: Any, outputs: Any) -> None:
        """Give the auxiliary loss the router logits of the whole row."""
        batch = self._batch
        if batch is not None and batch.shards is not None:
            join, count = batch.shards.join_rows, batch.num_tokens
            outputs["router_logits"] = tuple(join(x, count) for x in outputs["router_logits"])


def sum_weights(targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of the weights of shifted labels; without weights, the number of labels."""
    return (targets != IGNORE_INDEX).sum() if weights is None else weights.sum()


def _refuse_reentrance(model: nn.Module) -> None:
    """Refuse reentrant checkpoints, whose forward runs without gradients: router logits have none.

    The cross-entropy gets its gradient through the layer's output; the auxiliary loss would have
    none.
    """
    for layer in model.modules():
        if layer.training and getattr(layer, "gradient_checkpointing", False):
            function = getattr(layer, "_gradient_checkpointing_func", None)
            if getattr(function, "keywords", {}).get("use_reentrant"):
                raise ValueError(
                    "the auxiliary loss has no gradient with reentrant checkpoints: pass "
                    'gradient_checkpointing_kwargs={"use_reentrant": False}'
                )


def _counted_tokens(targets: Tensor, bounds: Tensor) -> Tensor:
    """Mark the tokens of documents that have a label; all of them if no document has one.

    >>> targets = torch.tensor([[6, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]])
    >>> _counted_tokens(targets, torch.tensor([0, 2, 5])).tolist()
    [[1, 1, 0, 0, 0]]
    """
    before = pad((targets.flatten() != IGNORE_INDEX).cumsum(0), (1, 0))
    has_label = before[bounds[1:]] > before[bounds[:-1]]
    mask = has_label.repeat_interleave(bounds.diff(), output_size=targets.numel())
    return (mask | ~mask.any()).view_as(targets).long()
