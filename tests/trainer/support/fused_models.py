"""Fused models of several families, in a process whose kernels are interpreted."""

from __future__ import annotations

import copy
import sys

import torch
from nopad.collators import PackedCollator
from nopad.runtime import STOCK_CLASS
from nopad.trainer.fused import fusion_patterns, rotary_patch
from nopad.trainer.fused.equivalence import outputs_match
from nopad.trainer.fused.rms_norm import add_rms_norm
from transformers import AutoConfig, AutoModelForCausalLM

fusing = sys.modules["nopad.trainer.fused.fuse_layers"]
for module in (fusing, fusion_patterns, rotary_patch):
    module.can_run = lambda x: True  # the kernels, although this is not a GPU

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 64,
}
BATCH = PackedCollator()([{"input_ids": list(range(1, n))} for n in (9, 5, 7)])
COUNTS = {"llama": 5, "granite": 4, "gemma2": 2, "cohere": 2}
"""Granite scales its residuals, gemma's norms have 1 + w, cohere rotates pairs."""


def build(family: str):
    torch.manual_seed(0)
    options = {"residual_multiplier": 0.5} if family == "granite" else {}
    config = AutoConfig.for_model(family, **SMALL, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**BATCH).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def check_family(family: str, count: int) -> None:
    model, other = build(family), build(family)
    gold, names = gradients(model), list(model.state_dict())
    classes = [type(module) for module in model.modules()]
    file = sys.modules[type(model).__module__]
    rotary = file.apply_rotary_pos_emb
    fused = fusing.fuse_layers(model)
    assert len(fused.names) == count, fused.names
    assert list(model.state_dict()) == names
    again = fusing.fuse_layers(model)  # finds everything fused, and leaves it so
    assert sorted(again.names) == sorted(fused.names)
    again.undo()
    assert not any(
        hasattr(cls, STOCK_CLASS) for module in model.modules() for cls in type(module).__mro__[1:]
    ), "fused twice"
    ours = gradients(model)
    scale = max(g.abs().max() for g in gold.values())
    difference = torch.stack([(ours[n] - gold[n]).abs().max() for n in gold]).max()  # NaN stays
    assert difference / scale < 1e-6, family
    assert file.apply_rotary_pos_emb is rotary, "another model of the file would be fused too"
    assert all(torch.equal(g, gold[n]) for n, g in gradients(other).items())
    for p in copy.deepcopy(model).parameters():
        p.data.zero_()  # a copy is a model of its own
    assert all(torch.equal(g, ours[n]) for n, g in gradients(model).items())
    fused.undo()
    assert [type(module) for module in model.modules()] == classes


def check_layers_that_are_not_fused() -> None:
    model = build("llama")
    mlp, norm, x = model.model.layers[0].mlp, model.model.norm, torch.randn(1, 3, 32)
    mlp.gate_proj.register_forward_pre_hook(lambda *_: None)
    fused = fusing.fuse_layers(model)
    assert "LlamaMLP" not in fused.names
    torch.testing.assert_close(norm(hidden_states=x), norm(x))
    fused.undo()
    stock = type(model.model.layers[0])

    class Forgetful(stock):
        def forward(self, hidden_states, position_ids=None, **kwargs):
            return stock.forward(self, hidden_states, **kwargs)

    model.model.layers[0].__class__ = Forgetful
    fused = fusing.fuse_layers(model)
    assert "LlamaRMSNorm" in fused.names
    assert "Forgetful" not in fused.names, "its attention gets other arguments"
    fused.undo()


def check_rotary_calls_the_kernel() -> None:
    model, calls = build("llama"), []
    stock = rotary_patch.is_supported
    rotary_patch.is_supported = lambda *tensors: calls.append(1) or stock(*tensors)
    fused = fusing.fuse_layers(model)
    model(**BATCH)
    fused.undo()
    model(**BATCH)
    rotary_patch.is_supported = stock
    assert len(calls) == 1, "once per layer, and only while fused"


def check_a_wider_delta_stays_wide() -> None:
    x, delta, weight = torch.randn(2, 32).bfloat16(), torch.randn(2, 32), torch.randn(32).bfloat16()
    residual, out = add_rms_norm(x, delta, weight, 1e-6)
    assert torch.equal(residual, x + delta) and out.dtype == torch.float32
    gold = torch.nn.functional.rms_norm(x + delta, (32,), eps=1e-6) * weight
    torch.testing.assert_close(out, gold)


def check_nan_matches_nothing() -> None:
    def stock(x):
        return x * 1.0, x * 1.0

    def broken(x):
        return x * 1.0, x * float("nan")

    x = torch.ones(3, requires_grad=True)
    assert outputs_match(stock, stock, [x], []) and not outputs_match(stock, broken, [x], [])


if __name__ == "__main__":
    for family, count in COUNTS.items():
        check_family(family, count)
    check_layers_that_are_not_fused()
    check_rotary_calls_the_kernel()
    check_a_wider_delta_stays_wide()
    check_nan_matches_nothing()
    print("finished")
