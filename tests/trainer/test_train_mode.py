"""Every front end trains in training mode, also a model that `from_pretrained` has returned."""

from __future__ import annotations

import front_ends
import pytest
import tiny_run
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from nopad.trainer.train_mode import ensure_train_mode
from nopad.trainer.with_accelerate import PackedAccelerateLoader


def modes_of_last_forward(model) -> dict[str, bool]:
    """Note the mode of every module when the model runs."""
    seen: dict[str, bool] = {}

    def note(_, *args) -> None:
        seen.update({name: module.training for name, module in model.named_modules()})

    model.register_forward_pre_hook(note)
    return seen


@pytest.mark.parametrize("front_end", front_ends.FIRST_STEP)
def test_a_model_in_eval_mode_is_trained_in_training_mode(front_end, tmp_path):
    model = tiny_run.model().eval()
    seen = modes_of_last_forward(model)
    front_ends.FIRST_STEP[front_end](model, tiny_run.dataset(), tmp_path)
    assert seen and all(seen.values())


@pytest.mark.parametrize("front_end", ["accelerate", "lightning"])
def test_parts_that_are_in_eval_mode_on_purpose_stay_so(front_end, tmp_path):
    model = tiny_run.model().train()
    model.model.layers[0].eval()
    seen = modes_of_last_forward(model)
    front_ends.FIRST_STEP[front_end](model, tiny_run.dataset(), tmp_path)
    assert seen[""] and not seen["model.layers.0.mlp"]


@pytest.mark.parametrize("no_grad", [True, False])
def test_a_loop_that_validates_keeps_eval_mode(no_grad):
    """Before the training without gradients, or after it has started."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(tiny_run.model().eval())
    loader, validation = (PackedAccelerateLoader(accelerator, tiny_run.dataset()) for _ in "tv")
    if not no_grad:
        next(iter(loader))
        assert model.training
        model.eval()
    with torch.set_grad_enabled(not no_grad):
        next(iter(validation))
    assert not model.training


def test_a_model_without_trainable_parameters_keeps_its_mode():
    teacher = tiny_run.model().eval().requires_grad_(False)
    ensure_train_mode(teacher)
    assert not teacher.training
