"""`HeadBypass`: make the LM head return its input, to compute the loss from hidden states.

    hidden ─▶ head: returns hidden ─▶ the model's changes of its logits ─▶ product and loss

A head is bypassed only if logits are just its product: an `nn.Linear` with the forward of its
class, without hooks. Hooks and patches may be added and removed, so every forward checks this.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import _has_any_global_hook

SOFTCAP_NAMES = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"
"""Names of a tanh soft cap on the logits in model configurations."""
SHARDING = "torch.distributed.", "transformers.distributed.", "transformers.integrations."
"""Modules whose hooks and forwards shard a weight, and leave its product as it is."""


class HeadBypass:
    """Lets a head return its input while active.

    It refers to the head only: if PEFT copies the head, the copy has a bypass that stays inactive.
    """

    def __init__(self, head: Any):
        self.head, self.active = head, False
        self._original, self._replaced = head.forward, vars(head).get("forward")
        head.forward = self.forward

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.active:
            return self._original(hidden)
        # Models that scale their logits scale the bias too: the last column shows by how much.
        return hidden if self.head.bias is None else nn.functional.pad(hidden, (0, 1), value=1.0)

    def remove(self) -> None:
        if bypass_of(self.head) is not self:
            return  # someone has wrapped this forward, and calls it
        del self.head.forward
        if self._replaced is not None:
            self.head.forward = self._replaced


def split_scale(hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states of a bypassed head, and its bias times the scale of the logits."""
    if bias is None:
        return hidden, None
    scale = hidden.detach().flatten()[-1].to(bias.dtype)
    return hidden[..., :-1].contiguous(), bias * scale


def has_plain_head(model: Any, head: Any) -> bool:
    """Return whether logits are a product with the head's weight, without soft cap."""
    config = model.config.get_text_config()
    is_capped = any(getattr(config, name, None) is not None for name in SOFTCAP_NAMES)
    return not is_capped and _is_linear(head) and _is_called_plainly(head)


def _is_linear(head: Any) -> bool:
    """Return whether a head is an `nn.Linear`, or was one before FSDP2 sharded it."""
    is_sharded = isinstance(head, FSDPModule) and nn.Linear in type(head).__bases__
    return type(head) is nn.Linear or is_sharded


def _is_called_plainly(head: nn.Module) -> bool:
    """Return whether a call of the head runs its class's forward, and nothing else."""
    changes = [*head._forward_pre_hooks.values(), *head._forward_hooks.values()]
    changes += [*head._backward_pre_hooks.values(), *head._backward_hooks.values()]
    if "forward" in vars(head) and bypass_of(head) is None:
        changes.append(vars(head)["forward"])
    return not _has_any_global_hook() and all(map(_shards, changes))


def _shards(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(SHARDING)


def bypass_of(head: Any) -> HeadBypass | None:
    """Return the bypass that is installed on a head."""
    owner = getattr(vars(head).get("forward"), "__self__", None)
    return owner if isinstance(owner, HeadBypass) else None


class NoLogits:
    """Placeholder for logits that were not computed: using it raises, with how to get them."""

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "no logits: with labels, the loss is computed without them; call "
            "model.nopad_loss.keep_logits() to have both, or the model without labels"
        )

    __getitem__ = __len__ = __iter__ = __array__ = __torch_function__ = _raise
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __neg__ = _raise
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __eq__ = _raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies and pickles ask for methods that are not there
            raise AttributeError(name)
        self._raise()

    def __repr__(self) -> str:
        return "not computed"
