"""The self-check fails on a NaN in any of its differences: max() and > would lose it."""

import pytest
import torch
from nopad.attention.hf import PackedDifferences, check_packed, check_paged, interface
from nopad.attention.hf.selfcheck import nan_max
from nopad.cli import doctor_isolation
from nopad.cli.tiny_model import randomize_weights, tiny_config
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

NAN = float("nan")


@pytest.fixture(scope="module")
def oracle():
    config = tiny_config(CONFIG_MAPPING["llama"]())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize_weights(model)
    return model.eval()


class Poison(torch.autograd.Function):
    """Pass on, and turn every gradient into NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * NAN


def spoil(monkeypatch, fault):
    """Let attention give NaN: over pages, in the gradient of q, or for the first document."""
    attend = interface.attend

    def broken(q, k, v, varlen, **rule):
        if fault == "gradient":
            return attend(Poison.apply(q), k, v, varlen, **rule)
        out = attend(q, k, v, varlen, **rule)
        if fault == "pages" and varlen.pages is not None:
            return out * NAN
        if fault == "first" and len(varlen.cu_seqlens) > 2:
            return torch.cat([out[:9] * NAN, out[9:]])
        return out

    monkeypatch.setattr(interface, "attend", broken)


@pytest.mark.parametrize("fault", ["pages", "gradient", "first"])
def test_nan_is_wrong(oracle, monkeypatch, fault):
    model = doctor_isolation.with_attention(oracle, "nopad")
    assert check_packed(model, oracle).within() and check_paged(model) < 1e-3
    spoil(monkeypatch, fault)
    packed = check_packed(model, oracle)
    assert packed.within() is (fault == "pages"), packed
    result = doctor_isolation.check_isolation(oracle, "nopad")
    if fault == "pages":  # the engine alone is wrong
        assert torch.tensor(check_paged(model)).isnan()
        assert result.verdict == "isolated" and result.engine_fault
    else:
        assert result.verdict == "WRONG"


def test_the_worst_of_numbers_is_the_one_that_is_none():
    assert nan_max([0.5, NAN, 1.0]) != nan_max([0.5, NAN, 1.0])
    assert nan_max([0.5, 2.0]) == 2.0 and nan_max([]) == 0.0


def test_every_difference_of_a_pack_counts():
    for place in range(4):
        numbers = [0.0] * 4
        numbers[place] = NAN
        assert not PackedDifferences(*numbers).within()
