"""`attach_loss`: make `model(**batch).loss` the exact token mean of an optimizer step.

    model(**batch).loss  =  sum of token losses / num_items_in_batch   (+ its auxiliary loss)

`attach_loss` wraps the forward of one model object; nothing global is changed. When labels are
passed, the LM head returns its input, and the loss is computed from the hidden states, so that
logits [T, vocabulary] are never materialized; without labels the model behaves as before. Models
with a special head or special logits still compute logits, and only their loss is replaced.
auxiliary_loss.py adds the auxiliary loss of mixtures of experts.
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

from ...packing import IGNORE_INDEX
from ...runtime import HostCopy, to_device, unwrap_peft
from ..fsdp_unshard import full_tensor, unsharded_head
from .auxiliary_loss import AuxiliaryLoss, sum_weights
from .cross_entropy import linear_cross_entropy
from .document_boundaries import document_contexts, reset_states
from .head_bypass import HeadBypass, NoLogits, bypass_of, has_plain_head, split_scale
from .heads import find_head, prepare_for_packs, reads_context, run_per_document, score_losses
from .sequence_parallel import RowShards, check_shardable
from .token_statistics import token_statistics


class AttachedLoss:
    """The loss of one model: created by `attach_loss`, removed by `detach`.

    Args:
        model: the causal LM, or a model with another head (`heads.py`), without wrappers.
        label_smoothing: fraction of each label that is spread over the vocabulary.
        z_loss: weight of the squared log-normalizer in the loss.
    """

    def __init__(self, model: Any, label_smoothing: float, z_loss: float):
        self.model, self.head = model, find_head(model)
        self.row_shards: RowShards | None = None
        """How rows are spread over sequence-parallel ranks; None if each rank has whole rows."""
        self.options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        self.is_trainers = False
        """Whether a trainer has attached it, and may replace it."""
        self.token_losses: Tensor | None = None
        """The loss of each label of the last batch [B, T], at the label's position, detached."""
        self.aux_loss: Tensor | None = None
        """The part of the last batch in the auxiliary loss of its step, detached; None without one.

        The auxiliary loss of a step is the mean over its batches and ranks; if the trainer does not
        divide by the accumulation steps, it is their sum.
        """
        self.mask_documents = False
        """Whether to pass the boundaries to stock masks, for models that drop positions."""
        self.measures_tokens = False
        """Whether the next batches are measured, which costs another product with the head."""
        self.token_statistics: Tensor | None = None
        """Statistics of the last batch, if it was measured: see `token_statistics`."""
        self._targets: tuple[Tensor, Any, Tensor | None] | None = None
        """Shifted labels, divisor and token weights of the current forward."""
        self._label_count: HostCopy | None = None
        self._keeps_logits = False
        self._bypass: HeadBypass | None = None
        self.keeps_state, self.reset_states = reset_states(model)
        """Whether layers have a recurrent state; the modules that run document by document."""
        self._auxiliary = AuxiliaryLoss(model)
        self._forward = model.forward
        self._prepared_forward = vars(model).get("forward")
        """The forward that Accelerate's `prepare` gave the model, if it did."""
        self._calls_loss = self.head in ("causal", "masked") and _calls_loss_function(model)
        model.forward = MethodType(_wrap_forward(model), model)
        if self._calls_loss:
            model.loss_function = self._loss
        self._find_bypass()  # now: it cannot be installed while the model is traced
        self._hooks = prepare_for_packs(model)
        self.needs_context = self.keeps_state or reads_context(model)
        """Whether layers read the boundaries from the forward context."""

    @property
    def fused(self) -> bool:
        """Whether the loss is computed from the hidden states, without logits."""
        return self._find_bypass() is not None

    def _find_bypass(self) -> HeadBypass | None:
        """Return the bypass of the head as it is now; None where logits have to be computed."""
        head = self.model.get_output_embeddings()
        if self._bypass is not None and self._bypass.head is not head:
            self._bypass.remove()  # the head was resized or wrapped by PEFT since
        computes_logits = self._keeps_logits or not (self._calls_loss or self.head == "masked")
        if computes_logits or not has_plain_head(self.model, head):
            return None
        self._bypass = bypass_of(head) or HeadBypass(head)
        return self._bypass

    def share_rows(self, group: Any) -> None:
        """Spread rows over the ranks of a process group from now on; None: keep them whole."""
        if group is not None:
            check_shardable(self.model)
        self.row_shards = None if group is None else RowShards(group)

    def keep_logits(self) -> None:
        """Compute logits from now on, for metrics that need them."""
        self._keeps_logits = True

    @contextmanager
    def logits_kept(self) -> Iterator[None]:
        """Compute logits inside the block."""
        before, self._keeps_logits = self._keeps_logits, True
        try:
            yield
        finally:
            self._keeps_logits = before

    def detach(self) -> None:
        """Restore the model's own forward and loss."""
        if self._bypass is not None:
            self._bypass.remove()
        self._auxiliary.remove()
        for hook in self._hooks:
            hook.remove()
        self.reset_states.undo()
        if self._calls_loss:
            del self.model._loss_function
        del self.model.forward
        if self._prepared_forward is not None:
            self.model.forward = self._prepared_forward
        del self.model.nopad_loss

    def __deepcopy__(self, memo: dict) -> AttachedLoss:
        memo[id(self.row_shards)] = self.row_shards  # process groups cannot be copied
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(deepcopy(vars(self), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Unpickling would restore the stock forward, which cannot work with the replaced loss.
        raise ValueError(
            "a model with an attached loss cannot be pickled: save its state_dict(), or call "
            "model.nopad_loss.detach() before and attach_loss(model) after"
        )

    def run(self, targets: Tensor, items: Any, weights: Tensor | None, args: Any, kwargs: Any):
        """Run the model's own forward with this loss.

        Args:
            targets: labels, shifted by one token for causal LMs.
            items: the divisor of the sum of token losses; default: the number of labels.
            weights: a weight for each token's loss, or None.
            args: positional arguments of the forward.
            kwargs: keyword arguments of the forward.
        """
        shards, shape, bypass = self.row_shards, targets.shape, self._find_bypass()
        divisor, as_tuple = _divisor(items, targets, weights), _wants_tuple(self.model, kwargs)
        try:
            self._auxiliary.begin(kwargs, targets, weights, divisor, shards)
            if shards is not None:
                divisor = divisor / shards.ranks  # gradients are averaged
                targets = shards.split(targets, IGNORE_INDEX)
                weights = None if weights is None else shards.split(weights)
                kwargs = shards.split_inputs(kwargs)
            self._targets = targets, divisor, weights
            self._label_count = count_labels(targets) if bypass is not None else None
            with self._documents(kwargs, targets):
                outputs = self._outputs(bypass, targets, args, kwargs)
                if shards is not None:
                    outputs, losses = shards.join_outputs(outputs, self.token_losses, shape)
                    self.token_losses = losses
        finally:
            self._targets = self._label_count = None
            self._auxiliary.end()
            if bypass is not None:
                bypass.active = False
        if as_tuple:
            return outputs.to_tuple()
        if bypass is not None and not torch.compiler.is_compiling():
            object.__setattr__(outputs, "logits", NoLogits())  # not an item: tuples lack it
        return outputs

    def _outputs(self, bypass: HeadBypass | None, targets: Tensor, args: Any, kwargs: Any) -> Any:
        kwargs = self._auxiliary.inputs(kwargs)
        if bypass is not None:
            bypass.active = True
        if self._calls_loss:
            kwargs = {**kwargs, "labels": targets}
        outputs = self._call(*args, **kwargs)
        fields = dict(outputs)  # in the order of the output's class
        if not self._calls_loss:
            compute = self._from_logits if bypass is None else self._loss
            fields["loss"] = compute(fields["logits"])
        if bypass is not None:
            del fields["logits"]  # they were hidden states
        self.aux_loss = self._auxiliary.scale(fields)
        return type(outputs)(**fields)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward; heads of documents return a row for each document."""
        if self.head == "document" and "cu_seq_lens_q" in kwargs:
            return run_per_document(self.model, self._forward, kwargs)
        return self._forward(*args, **kwargs)

    def align(self, labels: Tensor, last: float) -> Tensor:
        """Return labels at the positions that predict them; `last` follows the last one."""
        return _shift(labels, last) if self.head == "causal" else labels

    def _documents(self, kwargs: dict, row: Any) -> AbstractContextManager:
        """Pass the boundaries to stock masks, or to layers with a state."""
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None or not (self.mask_documents or self.needs_context):
            return nullcontext()
        return document_contexts(self, cu_seqlens, kwargs.get("input_ids", row).shape[-1])

    def _loss(self, logits: Tensor, *_: Any, **__: Any) -> Tensor:
        bypass = self._bypass
        if bypass is not None and bypass.active:
            return self._auxiliary.hold(self._from_hidden(logits, bypass.head))
        return self._auxiliary.hold(self._from_logits(logits))

    def _from_hidden(self, hidden: Tensor, head: Any) -> Tensor:
        assert self._targets is not None
        targets, divisor, weights = self._targets
        with unsharded_head(head):
            weight, bias = full_tensor(head.weight), full_tensor(head.bias)
            hidden, bias = split_scale(hidden, bias)
            total, losses = linear_cross_entropy(
                hidden.flatten(0, -2).to(weight.dtype),
                weight,
                targets.flatten(),
                bias=bias,
                token_weights=None if weights is None else weights.flatten(),
                divisor=divisor,
                num_labels=None if self._label_count is None else int(self._label_count.read()),
                **self.options,
            )
            if self.measures_tokens:
                rows = hidden.flatten(0, -2).to(weight.dtype)
                self.token_statistics = token_statistics(rows, targets.flatten(), weight, bias)
        self.token_losses = self._at_labels(losses.view_as(targets))
        return total

    def _at_labels(self, losses: Tensor) -> Tensor:
        """Return losses at the positions of their labels, detached."""
        return losses.detach().roll(1, -1) if self.head == "causal" else losses.detach()

    def _from_logits(self, logits: Tensor) -> Tensor:
        assert self._targets is not None
        targets, divisor, weights = self._targets
        logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        if self.head != "causal":
            scores = score_losses(self.model, logits, targets, weights is not None, self.options)
            if scores is not None:
                return self._sum(scores, divisor, weights)
        if self.measures_tokens:
            self.token_statistics = token_statistics(logits, targets.flatten())
        losses = nn.functional.cross_entropy(
            logits,
            targets.flatten(),
            reduction="none",
            label_smoothing=self.options["label_smoothing"],
        )
        squares = torch.logsumexp(logits, -1).square() * (targets.flatten() != IGNORE_INDEX)
        losses = (losses + self.options["z_loss"] * squares).view_as(targets)
        return self._sum(losses, divisor, weights)

    def _sum(self, losses: Tensor, divisor: Any, weights: Tensor | None) -> Tensor:
        self.token_losses = self._at_labels(losses)
        return (losses if weights is None else losses * weights).sum() / divisor


def attach_loss(
    model: Any,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    sequence_group: Any = None,
) -> AttachedLoss:
    """Make `model(**batch).loss` the exact mean of the step, without logits [T, vocabulary].

    Call it before DDP, FSDP or torch.compile wrap the causal LM, and before or after PEFT does. If
    PEFT trains or adapts the LM head, logits are computed. PEFT's virtual tokens are refused.

    Args:
        model: a causal LM of Transformers, or a model with another head (`heads.py`).
        label_smoothing: fraction of each label that is spread over the vocabulary.
        z_loss: weight of the squared log-normalizer in the loss.
        sequence_group: process group whose ranks share the tokens of a row (sequence parallelism):
            pass the same batch on each of them. The loss is that of the whole row; gradients are
            averaged over these ranks too, as DDP and FSDP do over all ranks.
    """
    model = unwrap_peft(model)
    if (before := find_loss(model)) is not None:
        before.detach()
    if not callable(getattr(model, "get_output_embeddings", None)):
        raise ValueError(f"{type(model).__name__} has no LM head to compute a loss from")
    loss = AttachedLoss(model, label_smoothing, z_loss)
    loss.mask_documents = before is not None and before.mask_documents
    # As a plain attribute: neither a submodule nor part of the state dict.
    object.__setattr__(model, "nopad_loss", loss)
    loss.share_rows(sequence_group)
    return loss


def find_loss(model: Any) -> AttachedLoss | None:
    """Return the loss attached to a model, if one is."""
    return getattr(model, "nopad_loss", None)


def attach_trainer_loss(model: Any, options: dict[str, float], sequence_group: Any) -> AttachedLoss:
    """Attach the loss of a trainer; refuse to replace one of the user's that has other options."""
    before = find_loss(unwrap_peft(model))
    agreed = options, dict.fromkeys(options, 0.0)
    if before is not None and not before.is_trainers and before.options not in agreed:
        raise ValueError(
            f"the model's loss was attached with {_named(before.options)}, but the trainer has "
            f"{_named(options)}: give both the same, or call model.nopad_loss.detach() first"
        )
    loss = attach_loss(model, **options, sequence_group=sequence_group)
    loss.is_trainers = True
    return loss


def _named(options: dict[str, float]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _wrap_forward(model: Any) -> Callable:
    """Return a forward to be bound as a method: a copy of the model binds its own."""
    stock = getattr(model.forward, "__func__", model.forward)
    forward = _loss_forward(stock)
    unprepared = getattr(vars(model).get("_original_forward"), "__func__", None)
    if unprepared is not None:
        # Accelerate's `unwrap_model(keep_fp32_wrapper=False)` binds the innermost `__wrapped__`.
        forward.__dict__["__wrapped__"] = _loss_forward(unprepared, is_unprepared=True)
    return forward


def _loss_forward(stock: Callable, is_unprepared: bool = False) -> Callable:
    """Return a forward with the loss.

    is_unprepared: run `stock` from the first call on, and not the forward of `prepare`.
    """

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
        if is_unprepared and loss._prepared_forward is not None:
            loss._forward, loss._prepared_forward = MethodType(stock, model), None
        if labels is None and shift_labels is None:
            inputs = (*args[:1], kwargs.get("input_ids"), kwargs.get("position_ids"))
            row = next((tensor for tensor in inputs if tensor is not None), None)
            with loss._documents(kwargs, row):  # the caller may compute a loss from the logits
                return loss._call(*args, **kwargs)
        _refuse_rounded(num_items_in_batch=num_items_in_batch, loss_weights=loss_weights)
        targets: Any = shift_labels if labels is None else loss.align(labels, IGNORE_INDEX)
        weights = None if loss_weights is None else loss.align(loss_weights, 0.0)
        return loss.run(targets, num_items_in_batch, weights, args, kwargs)

    # No __wrapped__ of the stock one: Accelerate would follow it when it unwraps a model.
    forward.__doc__, forward.__dict__["__signature__"] = stock.__doc__, signature(stock)
    return forward


def _refuse_rounded(**values: Any) -> None:
    """Refuse counts and weights that FSDP has rounded."""
    for name, value in values.items():
        if torch.is_tensor(value) and value.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"{name} was cast to {value.dtype}, which is too coarse for it: wrap the whole "
                "model with MixedPrecisionPolicy(..., cast_forward_inputs=False)"
            )


def _wants_tuple(model: Any, kwargs: dict) -> bool:
    """Return whether the caller wants a tuple; the model always returns a ModelOutput."""
    return_dict = kwargs.get("return_dict")
    if return_dict is None:
        return_dict = getattr(model.config, "return_dict", True)
    if not return_dict:
        kwargs["return_dict"] = True
    return not return_dict


def _calls_loss_function(model: Any) -> bool:
    """Return whether forward calls `self.loss_function` on all logits (Git's are truncated)."""
    code = unwrap(type(model).forward).__code__
    return "loss_function" in code.co_names and "shifted_logits" not in code.co_varnames


def _shift(values: Tensor, last: float) -> Tensor:
    """Shift left by one position: a token is predicted by the one before it.

    >>> _shift(torch.tensor([[-100, 6, 7]]), -100).tolist()
    [[6, 7, -100]]
    """
    return nn.functional.pad(values[..., 1:], (0, 1), value=last)


def _divisor(items: Any, targets: Tensor, weights: Tensor | None) -> Any:
    if torch.is_tensor(items):
        items = to_device(items, targets.device)
        return items + (items == 0)  # 0 / 1 if there are no labels; fractions below 1 are valid
    if items is not None:
        return items or 1
    return sum_weights(targets, weights).clamp(min=1 if weights is None else 1e-8)


def count_labels(targets: Tensor) -> HostCopy | None:
    """Start to count the labels; None while compiling or capturing: no number can be read there.

    The copy to the host starts before the layers run, so that the count has arrived when the loss
    needs it. If it were requested there, the device would idle until the answer is back.

    >>> int(count_labels(torch.tensor([[5, IGNORE_INDEX, 7]])).read())
    2
    """
    if torch.compiler.is_compiling():
        return None
    if targets.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return HostCopy((targets != IGNORE_INDEX).sum())
