"""Manual optimization: the optimizer steps that a `training_step` takes, compared with the packs.

    PackedDataModule(data, accumulation_steps=2)     loss of a pack = its share of two packs' mean
    training_step   backward(loss / 2)  backward(loss / 2), step      right
                    backward(loss), step                              refused: a step inside a step
    without it      backward(loss / 2)                                refused: gradients are kept

Every batch carries the label tokens of its step, which are counted before it is trained.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class ManualSteps:
    """Notices the steps of a trainer's optimizers."""

    def __init__(self, trainer: Any):
        self._trainer, self._stepped = trainer, False
        self.has_gradients = False
        """Whether a backward ran since the last optimizer step of the data."""
        self._global_step = trainer.global_step
        optimizers = [each for each in trainer.optimizers if isinstance(each, Optimizer)]
        self._handles = [each.register_step_post_hook(self._note) for each in optimizers]
        self._module = trainer.lightning_module
        self._clear_gradients = self._module.on_validation_model_zero_grad
        self._module.on_validation_model_zero_grad = self._clear_between_steps

    def _clear_between_steps(self) -> None:
        """Keep the gradients of an unfinished step, of which Lightning does not know.

        It clears gradients before a validation, to save memory.
        """
        if not self.has_gradients:
            self._clear_gradients()

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def check(self, packs: int, ends_step: bool) -> None:
        """Raise if the batch that was just trained has stepped too early, or not at all.

        packs: packs of an optimizer step on this rank.
        ends_step: whether the batch is the last of its step.
        """
        # A scaler may skip a step, which Lightning counts all the same.
        stepped = self._stepped or self._trainer.global_step != self._global_step
        self._stepped, self._global_step = False, self._trainer.global_step
        if stepped and not ends_step:
            raise ValueError(
                f"training_step steps inside an optimizer step of {packs} packs: step after every "
                f"{packs}, or pass another PackedDataModule(accumulation_steps=)"
            )
        has_gradients = self.has_gradients
        self.has_gradients = has_gradients and not ends_step
        if ends_step and has_gradients and not stepped:
            raise ValueError(
                f"training_step accumulates more than accumulation_steps={packs}, so that its loss "
                "would be a mean of means over packs: pass PackedDataModule(accumulation_steps=N), "
                "and step after every N packs with losses divided by N"
            )

    def release(self) -> None:
        """Stop noticing steps."""
        del self._module.on_validation_model_zero_grad
        for handle in self._handles:
            handle.remove()
