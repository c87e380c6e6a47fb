"""Lightning's import, a callback hook after optimizer steps, and the causal LMs of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...runtime import unwrap_peft

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    try:
        import lightning.pytorch as pl
    except ImportError:
        try:
            import pytorch_lightning as pl
        except ImportError:
            raise ImportError("lightning is not installed: pip install lightning") from None

__all__ = [
    "AfterStep",
    "causal_lm",
    "check_when_packed",
    "is_trained",
    "pl",
    "pretrained_models",
    "trained_lms",
]


class AfterStep(pl.Callback):
    """A callback with a hook after each optimizer step, never in the middle of an accumulation."""

    _last_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self.after_step(trainer, pl_module)

    def after_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called after an optimizer step."""


def causal_lm(module: nn.Module) -> Any:
    """Find the HF causal LM inside a Lightning module: the first one that it trains."""
    return trained_lms(module)[0]


def trained_lms(module: nn.Module) -> list[Any]:
    """Find the HF causal LMs that a Lightning module trains; if it trains none, its first."""
    models = [unwrap_peft(model) for model in pretrained_models(module)]
    if not models:
        raise ValueError(f"{type(module).__name__} has no HF causal LM: keep it as an attribute")
    models = [model for model in models if model.can_generate()] or models
    return [model for model in models if is_trained(model)] or models[:1]


def pretrained_models(module: nn.Module) -> list[Any]:
    """Return the outermost HF models inside a module, with the wrappers of PEFT."""
    if hasattr(module, "get_output_embeddings") and hasattr(module, "loss_function"):
        return [module]
    found = (model for child in module.children() for model in pretrained_models(child))
    return list({id(model): model for model in found}.values())


def is_trained(model: nn.Module) -> bool:
    """Return whether a parameter of a model is trained."""
    return any(parameter.requires_grad for parameter in model.parameters())


def check_when_packed(model: nn.Module, check: Callable[[], None]) -> RemovableHandle:
    """Call `check` before the first forward of a model that gets a pack."""

    def on_forward(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("cu_seq_lens_q") is not None:
            handle.remove()
            check()

    handle = model.register_forward_pre_hook(on_forward, with_kwargs=True)
    return handle
