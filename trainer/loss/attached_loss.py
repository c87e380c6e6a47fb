"""The exact loss of a step, from the model's own forward.

    model(**batch).loss  =  sum of token losses / num_items_in_batch   (+ the model's own extras)

`attach_loss` wraps the forward of one model object, and nothing global. While labels are given,
the LM head hands its input on and the loss is taken straight from the hidden states, so that
logits of T x vocabulary never exist; without labels the model is what it was. Models whose head or
logits are special keep computing logits, and only their loss becomes exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from inspect import signature, unwrap
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import document_mask
from ...packing import IGNORE_INDEX
from ...runtime import unwrap_peft
from .cross_entropy import linear_cross_entropy
from .label_count import AsyncLabelCount, ask

CAPS = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"
"""What configurations call a tanh over the logits."""


class AttachedLoss:
    """The loss of one model: made by `attach_loss`, taken off by `detach`."""

    def __init__(self, model: Any, label_smoothing: float, z_loss: float):
        self.model = model
        self.options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        self.fused = False
        """Whether the loss comes straight from the hidden states."""
        self.token_losses: Tensor | None = None
        """Of the last batch: the loss of each label [B, T], at the label's position, detached."""
        self.mask_documents = False
        """Whether stock masks are told the boundaries, for models that do not pass positions on."""
        self._request: tuple[Tensor, Any, Tensor | None] | None = None
        self._count: AsyncLabelCount | None = None
        self._forward = model.forward
        self._asked = _calls_loss_function(model)
        model.forward = MethodType(_asking(model.forward), model)
        if self._asked:
            model.loss_function = self._loss
        self._take_head()

    def _take_head(self) -> None:
        self.head = self.model.get_output_embeddings()
        self.fused = self._asked and _linear(self.model, self.head)
        if self.fused:
            self._gate = _Gate(self.head)

    def keep_logits(self) -> None:
        """Compute logits after all, for metrics that need them."""
        if self.fused:
            self._gate.remove()
        self.fused = False

    @contextmanager
    def logits_kept(self) -> Iterator[None]:
        """Compute logits for as long as this lasts."""
        fused = self.fused
        self.keep_logits()
        try:
            yield
        finally:
            if fused:
                self._take_head()

    def detach(self) -> None:
        """Give the model back as it was."""
        self.keep_logits()
        if self._asked:
            del self.model._loss_function
        del self.model.forward
        del self.model.nopad_loss

    def __deepcopy__(self, memo: dict) -> AttachedLoss:
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(deepcopy(vars(self), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The forward would come back as the stock one, and meet half a loss.
        raise ValueError(
            "a model with an attached loss cannot be pickled: save its state_dict(), or call "
            "model.nopad_loss.detach() before and attach_loss(model) after"
        )

    def run(self, targets: Tensor, items: Any, weights: Tensor | None, args: Any, kwargs: Any):
        """Run the model's own forward, and have it return this loss."""
        if self.fused and self.model.get_output_embeddings() is not self.head:
            self.keep_logits()  # since then it was resized, or PEFT adapts it
            self._take_head()
        self._request = targets, items, weights
        self._count = ask(targets) if self.fused else None
        as_tuple = _wants_tuple(self.model, kwargs)
        try:
            with self._boundaries(kwargs, targets):
                outputs = self._outputs(targets, args, kwargs)
        finally:
            self._request = self._count = None
            if self.fused:
                self._gate.open = False
        return outputs.to_tuple() if as_tuple else outputs

    def _outputs(self, targets: Tensor, args: Any, kwargs: Any) -> Any:
        if not self._asked:
            outputs = self._forward(*args, **kwargs)
            loss = self._from_logits(outputs.logits)
            outputs = type(outputs)(**{**outputs, "loss": loss})  # the fields' order: it is first
        elif not self.fused:
            outputs = self._forward(*args, labels=targets, **kwargs)
        else:
            self._gate.open = True
            outputs = self._forward(*args, labels=targets, **kwargs)
            kept = {name: value for name, value in outputs.items() if name != "logits"}
            outputs = type(outputs)(**kept)  # without what were hidden states
        return outputs

    def _boundaries(self, kwargs: dict, targets: Tensor) -> AbstractContextManager:
        if self.mask_documents and "cu_seq_lens_q" in kwargs:
            return document_mask(kwargs["cu_seq_lens_q"], targets.shape[-1])
        return nullcontext()

    def _loss(self, logits: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._from_hidden(logits) if self.fused else self._from_logits(logits)

    def _from_hidden(self, hidden: Tensor) -> Tensor:
        assert self._request is not None
        targets, items, weights = self._request
        with _gathered(self.head):
            weight, bias = _whole(self.head.weight), _whole(self.head.bias)
            total, losses = linear_cross_entropy(
                hidden.flatten(0, -2).to(weight.dtype),
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

    def _from_logits(self, logits: Tensor) -> Tensor:
        assert self._request is not None
        targets, items, weights = self._request
        logits = logits.flatten(0, -2).float()
        losses = nn.functional.cross_entropy(
            logits,
            targets.flatten(),
            reduction="none",
            label_smoothing=self.options["label_smoothing"],
        )
        squares = torch.logsumexp(logits, -1).square() * (targets.flatten() != IGNORE_INDEX)
        losses = (losses + self.options["z_loss"] * squares).view_as(targets)
        self.token_losses = losses.detach().roll(1, -1)
        total = (losses if weights is None else losses * weights).sum()
        return total / _divisor(items, targets, weights)


class _Gate:
    """Lets a head hand its input on, while open.

    It hangs on the head and knows nothing else: a copy of the head, as PEFT makes them, is a head
    with a gate that nobody opens.
    """

    def __init__(self, head: nn.Module):
        self.head, self.open, self._usual = head, False, head.forward
        head.forward = self.forward

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if self.open else self._usual(hidden)

    def remove(self) -> None:
        del self.head.forward


def attach_loss(model: Any, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> AttachedLoss:
    """Let `model(**batch).loss` be the exact mean of a step, without logits of T x vocabulary.

    Call it before DDP, FSDP or torch.compile wrap the causal LM; before or after PEFT does. Where
    PEFT trains or adapts the LM head, logits are computed. Virtual tokens of PEFT are refused.
    """
    model = unwrap_peft(model)
    if hasattr(model, "nopad_loss"):
        model.nopad_loss.detach()
    if not callable(getattr(model, "get_output_embeddings", None)):
        raise ValueError(f"{type(model).__name__} has no LM head to take a loss from")
    loss = AttachedLoss(model, label_smoothing, z_loss)
    object.__setattr__(model, "nopad_loss", loss)  # no submodule, nothing in the state dict
    return loss


def _asking(original: Any) -> Callable:
    """A forward for a model, as a method: a copy of the model has it for itself."""

    def forward(
        model: Any,
        *args: Any,
        labels: Any = None,
        shift_labels: Any = None,
        num_items_in_batch: Any = None,
        loss_weights: Tensor | None = None,
        **kwargs: Any,
    ):
        loss: AttachedLoss = model.nopad_loss
        if labels is None and shift_labels is None:
            return loss._forward(*args, **kwargs)
        targets: Any = shift_labels if labels is None else _shift(labels, IGNORE_INDEX)
        weights = None if loss_weights is None else _shift(loss_weights, 0.0)
        return loss.run(targets, num_items_in_batch, weights, args, kwargs)

    stock = getattr(original, "__func__", original)
    # No __wrapped__: Accelerate follows it down to the stock forward when it unwraps a model.
    forward.__doc__, forward.__dict__["__signature__"] = stock.__doc__, signature(stock)
    return forward


def _wants_tuple(model: Any, kwargs: dict) -> bool:
    """Whether the caller wants no ModelOutput; the model itself is asked for one in any case."""
    asked = kwargs.get("return_dict")
    if asked is None:
        asked = getattr(model.config, "return_dict", True)
    if not asked:
        kwargs["return_dict"] = True
    return not asked


def _linear(model: Any, head: Any) -> bool:
    """Whether logits are a plain product of hidden states, at most scaled."""
    config = model.config.get_text_config()
    return type(head) is nn.Linear and all(getattr(config, cap, None) is None for cap in CAPS)


def _calls_loss_function(model: Any) -> bool:
    """Whether the model's loss goes by a name we can take, and gets all logits (Git cuts)."""
    code = unwrap(type(model).forward).__code__
    return "loss_function" in code.co_names and "shifted_logits" not in code.co_varnames


def _shift(values: Tensor, last: float) -> Tensor:
    """Move everything one position to the left: a token is predicted by the one before it.

    >>> _shift(torch.tensor([[-100, 6, 7]]), -100).tolist()
    [[6, 7, -100]]
    """
    return nn.functional.pad(values[..., 1:], (0, 1), value=last)


def _divisor(items: Any, targets: Tensor, weights: Tensor | None) -> Any:
    if torch.is_tensor(items):
        items = items.to(targets.device)
        return items + (items == 0)  # nothing counted: 0 / 1; a share of an item is legal
    if items is not None:
        return items or 1
    if weights is not None:
        return weights.sum().clamp(min=1e-8)
    return (targets != IGNORE_INDEX).sum().clamp(min=1)


@contextmanager
def _gathered(head: Any) -> Iterator[None]:
    """Have FSDP2 gather a head that is a unit of its own again: the gated call let it go.

    The gradient then takes FSDP's way over the ranks, and after the backward the head is let go.
    """
    let_go = hasattr(head, "unshard") and hasattr(head.weight, "full_tensor")
    if let_go:
        head.unshard()
    yield
    if let_go and not torch.is_grad_enabled():
        head.reshard()


def _whole(parameter: Any) -> Any:
    """A parameter cut by tensor parallelism, where all ranks compute the same, put together."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
