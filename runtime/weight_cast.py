"""Weights in the dtype of autocast's products, cast once per optimizer step.

Autocast casts every weight again in each forward. Between two optimizer steps the weights do not
change, so the micro-batches of a step, and recomputation in the backward, share one copy:

    step n      micro-batch 1: cast    2: reuse    3: reuse    ...    optimizer: copies are freed
    step n + 1  micro-batch 1: cast    ...

The first step with accumulation reveals it, and casts twice; without accumulation, and outside grad
mode, nothing is kept or reused. A copy is reused only while its weight has a gradient, that is
within a step, so that changes between steps that PyTorch does not count (through `.data`, as by an
average of the weights) are not missed.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary


class _Copy:
    """The copy of one weight, once a second micro-batch has asked for it within a step."""

    def __init__(self) -> None:
        self.keeps = False
        self.tensor: Tensor | None = None
        self.version: tuple[int, int] | None = None


_copies = WeakTensorKeyDictionary()


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in `dtype`, detached; the weight itself if it has that dtype.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> cast_weight(weight, torch.float32) is weight
    True
    >>> cast_weight(weight, torch.bfloat16) is cast_weight(weight, torch.bfloat16)
    False
    >>> weight.grad = torch.zeros(2)  # the first micro-batch of a step has ended
    >>> cast_weight(weight, torch.bfloat16) is cast_weight(weight, torch.bfloat16)
    True
    """
    if weight.dtype == dtype:
        return weight
    is_trained = weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()
    if torch.compiler.is_compiling() or not is_trained:
        return weight.detach().to(dtype)
    _free_copies_after_steps()
    copy = _copies.get(weight)
    if copy is None:
        copy = _copies[weight] = _Copy()
    within_step, version = weight.grad is not None, (weight._version, weight.data_ptr())
    copy.keeps |= within_step
    tensor = copy.tensor
    is_valid = tensor is not None and tensor.dtype == dtype and copy.version == version
    if tensor is None or not (is_valid and (within_step or _in_backward())):
        tensor = weight.detach().to(dtype)
        copy.tensor, copy.version = (tensor, version) if copy.keeps else (None, None)
    return tensor


def _in_backward() -> bool:
    """Whether this is a recomputation in the backward: the weights are those of the forward."""
    return torch._C._current_graph_task_id() != -1


@cache
def _free_copies_after_steps() -> None:
    """Free the copies after every optimizer step, since it may write through `.data` uncounted."""
    register_optimizer_step_post_hook(lambda *_: _free_copies())


def _free_copies() -> None:
    for copy in list(_copies.values()):
        copy.tensor = None
