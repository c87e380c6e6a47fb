"""The exact loss of a step, from the model's own forward.

    model(**batch).loss  =  sum of token losses / num_items_in_batch   (+ the model's own extras)

`attach_loss` wraps the forward of one model object, and nothing global. While labels are given,
the LM head hands its input on and the loss is taken straight from the hidden states, so that
logits of T x vocabulary never exist; without labels the model is what it was. Models whose head or
logits are special keep computing logits, and only their loss becomes exact.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import keep_apart
from ..packing import IGNORE
from .counting import LabelCount, ask
from .cross_entropy import linear_cross_entropy


class ModelLoss:
    """The loss of one model: made by `attach_loss`, taken off by `detach`."""

    def __init__(self, model: Any, label_smoothing: float, z_loss: float):
        self.model = model
        self.head = model.get_output_embeddings()
        self.options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        self.fused = _can_fuse(model, self.head)
        """Whether the loss comes straight from the hidden states."""
        self.token_losses: Tensor | None = None
        """Of the last batch: the loss of each label [B, T], at the label's position, detached."""
        self.apart = False
        """Whether stock masks are told the boundaries, for models that do not pass positions on."""
        self._request: tuple[Tensor, Any, Tensor | None] | None = None
        self._count: LabelCount | None = None
        self._forward, self._head_forward = model.forward, self.head.forward
        model.forward = self._wrap(model.forward)
        if self.fused:
            self.head.forward = self._hand_on
            model.loss_function = self._from_hidden

    def keep_logits(self) -> None:
        """Compute logits after all, for metrics that need them."""
        if self.fused:
            del self.head.forward, self.model._loss_function
        self.fused = False

    def detach(self) -> None:
        """Give the model back as it was."""
        self.keep_logits()
        del self.model.forward
        del self.model.nopad_loss

    def _wrap(self, original: Callable) -> Callable:
        @wraps(original)
        def forward(
            *args: Any,
            labels: Any = None,
            shift_labels: Any = None,
            num_items_in_batch: Any = None,
            loss_weights: Tensor | None = None,
            **kwargs: Any,
        ):
            if labels is None and shift_labels is None:
                return original(*args, **kwargs)
            targets: Any = shift_labels
            if labels is not None:
                targets = _shift(labels, IGNORE)
            weights = None if loss_weights is None else _shift(loss_weights, 0.0)
            self._request = targets, num_items_in_batch, weights
            self._count = ask(targets) if self.fused else None
            try:
                with self._boundaries(kwargs, targets):
                    if not self.fused:
                        return self._from_logits(original(*args, **kwargs))
                    outputs = original(*args, labels=targets, **kwargs)
                    outputs.logits = None  # they were hidden states
                    return outputs
            finally:
                self._request = None

        return forward

    def _boundaries(self, kwargs: dict, targets: Tensor) -> AbstractContextManager:
        if self.apart and "cu_seq_lens_q" in kwargs:
            return keep_apart(kwargs["cu_seq_lens_q"], targets.shape[-1])
        return nullcontext()

    def _hand_on(self, hidden: Tensor) -> Tensor:
        return self._head_forward(hidden) if self._request is None else hidden

    def _from_hidden(self, logits: Tensor, *_: Any, **__: Any) -> Tensor:
        assert self._request is not None
        targets, items, weights = self._request
        weight, bias = _whole(self.head.weight), _whole(self.head.bias)
        total, losses = linear_cross_entropy(
            logits.flatten(0, -2).to(weight.dtype),
            weight,
            targets.flatten(),
            bias=bias,
            token_weights=None if weights is None else weights.flatten(),
            divisor=_divisor(items, targets, weights),
            counted=None if self._count is None else self._count.read(),
            **self.options,
        )
        self.token_losses = losses.view_as(targets).roll(1, -1)
        return total

    def _from_logits(self, outputs: Any) -> Any:
        assert self._request is not None
        targets, items, weights = self._request
        logits = outputs.logits.flatten(0, -2).float()
        losses = nn.functional.cross_entropy(
            logits,
            targets.flatten(),
            reduction="none",
            label_smoothing=self.options["label_smoothing"],
        )
        squares = torch.logsumexp(logits, -1).square() * (targets.flatten() != IGNORE)
        losses = (losses + self.options["z_loss"] * squares).view_as(targets)
        self.token_losses = losses.detach().roll(1, -1)
        total = (losses if weights is None else losses * weights).sum()
        outputs.loss = total / _divisor(items, targets, weights)
        return outputs


def attach_loss(model: Any, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> ModelLoss:
    """Let `model(**batch).loss` be the exact mean of a step, without logits of T x vocabulary.

    Call it on the bare causal LM, before DDP, FSDP, PEFT or torch.compile wrap it.
    """
    if hasattr(model, "nopad_loss"):
        model.nopad_loss.detach()
    if not callable(getattr(model, "get_output_embeddings", None)):
        raise ValueError(f"{type(model).__name__} has no LM head to take a loss from")
    loss = ModelLoss(model, label_smoothing, z_loss)
    object.__setattr__(model, "nopad_loss", loss)  # no submodule, nothing in the state dict
    return loss


def _can_fuse(model: Any, head: nn.Module) -> bool:
    """A plain linear head, logits without a non-linear step, and a loss that goes by our name."""
    soft = getattr(model.config, "final_logit_softcapping", None)
    return type(head) is nn.Linear and soft is None and _calls_loss_function(model)


def _calls_loss_function(model: Any) -> bool:
    code = getattr(type(model).forward, "__wrapped__", type(model).forward).__code__
    return "loss_function" in code.co_names


def _shift(values: Tensor, last: float) -> Tensor:
    """Move everything one position to the left: a token is predicted by the one before it.

    >>> _shift(torch.tensor([[-100, 6, 7]]), -100).tolist()
    [[6, 7, -100]]
    """
    return nn.functional.pad(values[..., 1:], (0, 1), value=last)


def _divisor(items: Any, targets: Tensor, weights: Tensor | None) -> Any:
    if items is not None:
        return items.to(targets.device) if torch.is_tensor(items) else items
    if weights is not None:
        return weights.sum().clamp(min=1e-8)
    return (targets != IGNORE).sum().clamp(min=1)


def _whole(parameter: Any) -> Any:
    """A sharded parameter that nothing has gathered yet, gathered."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
