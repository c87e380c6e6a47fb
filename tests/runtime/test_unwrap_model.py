"""The causal language model inside DDP, torch.compile and PEFT wrappers."""

from types import SimpleNamespace

import pytest
import torch
from nopad.runtime import unwrap_model, unwrap_peft
from torch import nn


class Model(nn.Module):
    """A model with a config, as Transformers has it."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()
        self.layer = nn.Linear(2, 2)


class Wrapper(nn.Module):
    """A wrapper like DDP: the model is its `module`, and it has no config."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class Peft(nn.Module):
    """A wrapper like PEFT's."""

    def __init__(self, model, prompt_learning=False):
        super().__init__()
        self.base_model = model
        self.active_peft_config = SimpleNamespace(is_prompt_learning=prompt_learning)

    def get_base_model(self):
        return self.base_model


def test_wrappers_are_removed_in_any_order():
    model = Model()
    assert unwrap_model(model) is model
    assert unwrap_model(Wrapper(model)) is model
    assert unwrap_model(torch.compile(model)) is model
    assert unwrap_model(Peft(model)) is model
    assert unwrap_model(Wrapper(torch.compile(Peft(model)))) is model
    assert unwrap_model(torch.compile(Wrapper(Peft(torch.compile(model))))) is model


def test_only_peft_is_removed_by_its_own_function():
    model = Model()
    wrapped = Wrapper(model)
    assert unwrap_peft(wrapped) is wrapped and unwrap_peft(Peft(model)) is model


@pytest.mark.parametrize("unwrap", [unwrap_model, unwrap_peft])
def test_virtual_tokens_are_refused(unwrap):
    with pytest.raises(ValueError, match="virtual tokens that the pack boundaries"):
        unwrap(Peft(Model(), prompt_learning=True))
