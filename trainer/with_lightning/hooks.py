"""What the callbacks share: Lightning's import, a hook after the optimizer step, the causal LM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

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
            raise ImportError(
                "lightning is not installed: pip install 'nopad[lightning]'"
            ) from None

__all__ = ["AfterStep", "causal_lm", "has_causal_lm", "pl"]


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


def causal_lm(module: nn.Module) -> nn.Module:
    """Find the HF causal LM inside a Lightning module."""
    for submodule in module.modules():
        if _is_causal_lm(submodule):
            return unwrap_peft(submodule)
    raise ValueError(f"{type(module).__name__} has no HF causal LM: keep it as an attribute")


def has_causal_lm(module: nn.Module) -> bool:
    """Return whether a Lightning module has its HF causal LM: it may create it later."""
    return any(map(_is_causal_lm, module.modules()))


def _is_causal_lm(module: nn.Module) -> bool:
    return hasattr(module, "get_output_embeddings") and hasattr(module, "loss_function")
