"""Fused layers as objects: pickled and copied they stay what they are."""

from __future__ import annotations

import io
import pickle
import sys
import threading
from copy import deepcopy
from types import SimpleNamespace

import pytest
import tiny_run
import torch
from nopad.collators import PackedCollator
from nopad.runtime import STOCK_CLASS
from nopad.trainer.fused import compile_layers, fuse_layers
from nopad.trainer.fused.class_swap import add_forward, can_run, fused_subclass, has_no_hooks
from nopad.trainer.fused.equivalence import module_matches, outputs_match, trial_input
from nopad.trainer.fused.fuse_layers import PARTS
from nopad.trainer.fused.rotary_patch import is_supported
from nopad.trainer.loss import attach_loss
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

fusing = sys.modules["nopad.trainer.fused.fuse_layers"]


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again", [saved_and_loaded, deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_fused_model_is_saved_whole_and_copied(again):
    model = tiny_run.model()
    for part in PARTS:
        for module in model.modules():
            if part.matches(module):
                module.__class__ = add_forward(type(module), part.forward)
    assert sum(hasattr(type(module), STOCK_CLASS) for module in model.modules()) > 4 * 2
    ids = torch.randint(1, 61, (1, 9))
    gold, other = model(ids).logits, again(model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    assert torch.equal(other(ids).logits, gold)


class Dropping(nn.Module):
    def __init__(self, share: float):
        super().__init__()
        self.weight, self.share = nn.Parameter(torch.ones(6)), share

    def forward(self, x):
        return nn.functional.dropout(x * self.weight, self.share, self.training)


def test_what_drops_out_in_training_is_not_fused_although_it_does_not_now():
    fused = fused_subclass(Dropping, lambda module, fallback, x: x * module.weight)
    assert module_matches(Dropping(0.0).eval(), fused, torch.device("cpu"))
    assert not module_matches(Dropping(0.5).eval(), fused, torch.device("cpu"))


def test_results_of_another_structure_or_dtype_do_not_match():
    x = trial_input(torch.ones(1, dtype=torch.bfloat16), 9)
    assert outputs_match(torch.sin, torch.sin, [x], [])
    assert not outputs_match(lambda x: (x.sin(),), torch.sin, [x], []), (
        "a tuple, and the tensor itself"
    )
    assert not outputs_match(lambda x: x.float().sin(), torch.sin, [x], []), "a wider result"


class Scaled(nn.Module):
    def __init__(self, scale: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        return x * self.weight * self.scale


def test_a_difference_that_bf16_would_hide_is_seen_in_fp32():
    cpu, fused = (
        torch.device("cpu"),
        fused_subclass(Scaled, lambda module, fallback, x: x * module.weight),
    )
    assert module_matches(Scaled(1.0).bfloat16(), fused, cpu)
    assert not module_matches(Scaled(0.99).bfloat16(), fused, cpu)


def test_what_tf32_rounds_is_forgiven_and_a_multiplier_is_not():
    x = trial_input(torch.ones(1), 9)
    for factor, alike in ((1.0003, True), (0.998, False)):
        assert outputs_match(torch.sin, lambda x, factor=factor: x.sin() * factor, [x], []) == alike


def test_a_dropout_too_small_for_a_trial_is_seen():
    fused = fused_subclass(Dropping, lambda module, fallback, x: x * module.weight)
    state = torch.get_rng_state()
    assert not module_matches(Dropping(1e-6), fused, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)


def scaled(module, fallback, x):
    return x * module.weight


@pytest.fixture
def fusible(monkeypatch):
    """Fuses `Scaled` and `Dropping`, without a kernel, here."""
    part = SimpleNamespace(
        matches=lambda module: isinstance(module, Scaled | Dropping),
        forward=scaled,
        verify=module_matches,
    )
    monkeypatch.setattr(fusing, "PARTS", [part])
    monkeypatch.setattr(fusing, "can_run", lambda x: True)


def test_parts_with_tensors_of_their_own_are_all_tried(fusible, monkeypatch):
    tried = []
    monkeypatch.setattr(fusing.PARTS[0], "verify", lambda module, *_: tried.append(module) or True)
    scaled = [Scaled(share) for share in (0.2, 0.5, 1.0)]
    fusing.fuse_layers(nn.Sequential(*scaled))
    assert tried == scaled
    for bias, count in ((None, 2), (torch.ones(6), 3)):
        plain, tried[:] = [Dropping(0.0), Dropping(0.0), Dropping(0.1)], []
        plain[0].bias = bias
        plain[1].bias = plain[2].bias = None
        fusing.fuse_layers(nn.Sequential(*plain))
        assert len(tried) == count


def test_a_part_that_cannot_be_tried_stays_and_the_others_are_fused(fusible):
    model = nn.Sequential(Scaled(1.0), Dropping(0.0))
    model[0].lock = threading.Lock()
    assert fusing.fuse_layers(model).names == ["Dropping"]
    model = nn.Sequential(Scaled(1.0), Dropping(0.0))
    model[0].cached = model[0].weight * 2
    assert fusing.fuse_layers(model).names == ["Dropping"]
    with torch.device("meta"):
        model = nn.Sequential(Scaled(1.0))
    assert fusing.fuse_layers(model).names == []


def test_a_class_of_no_module_is_fused_as_any_other(fusible):
    class Stray(Scaled):
        __module__ = "gone.long.ago"

    assert fusing.fuse_layers(nn.Sequential(Stray(1.0))).names == ["Stray"]


def test_a_failure_half_way_leaves_nothing_fused(fusible, monkeypatch):
    broken = SimpleNamespace(matches=lambda module: 1 / 0)
    monkeypatch.setattr(fusing, "PARTS", [*fusing.PARTS, broken])
    model = nn.Sequential(Scaled(1.0))
    with pytest.raises(ZeroDivisionError):
        fusing.fuse_layers(model)
    assert type(model[0]) is Scaled


def test_undo_leaves_what_something_else_has_wrapped_since(fusible):
    model = nn.Sequential(Scaled(1.0), Scaled(1.0))
    fused = fusing.fuse_layers(model)
    fused_class = type(model[1])
    wrapped = type("FSDPScaled", (fused_class,), {})  # as fully_shard wraps a module: by its class
    model[1].__class__ = wrapped
    with pytest.raises(ValueError, match=r"FSDPScaled.*undo before fully_shard"):
        fused.undo()
    assert [type(module) for module in model] == [fused_class, wrapped] and fused.names == [
        "Scaled"
    ]
    model[1].__class__ = fused_class
    fused.undo()
    fused.undo()
    assert [type(module) for module in model] == [Scaled, Scaled] and fused.names == []


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_any_kind_keeps_a_module_from_being_passed_over(name):
    module = nn.Linear(2, 2)
    assert has_no_hooks(module)
    everywhere = getattr(nn.modules.module, name.replace("register_", "register_module_"))
    for register in (getattr(module, name), everywhere):
        handle = register(lambda *_: None)
        assert not has_no_hooks(module)
        handle.remove()
        assert has_no_hooks(module)


def test_the_kernels_are_for_tensors_of_the_current_device_only(monkeypatch):
    class Away(torch.Tensor):
        is_cuda = True

        def get_device(self):
            return 1

    x = torch.zeros(3).as_subclass(Away)
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert can_run(x) == (current == 1)
    assert not can_run(torch.zeros(3)) and not can_run(None)


def test_angles_that_learn_are_turned_by_the_model_itself():
    q, angles = torch.randn(1, 2, 3, 4), torch.randn(1, 3, 4)
    assert is_supported(q, q, angles, angles)
    learnt = angles.clone().requires_grad_()
    assert not is_supported(q, q, learnt, angles) and not is_supported(q, q, angles, learnt)


def adapted(model):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["bf16 weights", "autocast", "adapters", "compiled"])
def test_a_bf16_step_is_as_near_to_fp32_as_without_our_kernels(way):
    tokens = torch.randint(1, 300, (1, 500), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": piece.tolist()} for piece in tokens[0].split([90, 200, 210])]
    batch = {k: v.cuda() if torch.is_tensor(v) else v for k, v in PackedCollator()(rows).items()}

    def gradients(low: bool, prepare) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=300, hidden_size=128, intermediate_size=320,
                             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                             attn_implementation="sdpa")  # fmt: skip
        model = LlamaForCausalLM(config).cuda()
        if way == "adapters":
            model = adapted(model)
        if low and way != "autocast":
            model = model.to(torch.bfloat16)
        prepare(model)
        with torch.autocast("cuda", torch.bfloat16, enabled=low and way == "autocast"):
            model(**batch).loss.backward()
        return {n: p.grad.float() for n, p in model.named_parameters() if p.requires_grad}

    def ours(model) -> None:
        attach_loss(model)
        assert way == "compiled" or len(fuse_layers(model).names) == 5
        if way == "compiled":
            compile_layers(model)

    gold = gradients(False, lambda model: None)
    low = gradients(True, lambda model: None)
    for name, gradient in gradients(True, ours).items():
        error, allowed = ((g[name] - gold[name]).norm() for g in ({name: gradient}, low))
        assert error <= 2 * allowed, name
