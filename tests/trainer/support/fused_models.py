"""Fused models of several families, in a process whose kernels are interpreted."""

from __future__ import annotations

import copy
import functools
import sys

import torch
import torch.distributed as dist
from nopad.collators import PackedCollator
from nopad.runtime import STOCK_CLASS
from nopad.trainer.fused import equivalence, fusion_patterns, gated_mlp, rotary_patch
from nopad.trainer.fused.equivalence import outputs_match
from nopad.trainer.fused.rms_norm import add_rms_norm
from torch.distributed.fsdp import fully_shard
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
BATCH = PackedCollator()([{"input_ids": list(range(1, n))} for n in (5, 2, 4)])
COUNTS = {"llama": 5, "granite": 4, "gemma2": 2, "cohere": 2}
WHOLE = sys.argv[1:] == ["whole"]
"""Granite scales its residuals, gemma's norms have 1 + w, cohere rotates pairs."""


def build(family: str, **options):
    torch.manual_seed(0)
    options |= {"residual_multiplier": 0.5} if family == "granite" else {}
    config = AutoConfig.for_model(family, **{**SMALL, **options})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@functools.cache
def fused_llama():
    """One for the checks of what comes after: those that change it copy it."""
    model = build("llama")
    assert "LlamaMLP" in fusing.fuse_layers(model).names
    return model


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


def check_autocast(family: str) -> None:
    """Under autocast fused layers are as near to fp32 as the stock ones, and calls are as many."""
    model = build(family)
    gold = gradients(model)

    def errors() -> tuple[float, dict[str, torch.Tensor]]:
        with torch.autocast("cpu", torch.bfloat16):
            grads = gradients(model)
        assert all(g.dtype == torch.float32 for g in grads.values())
        difference = sum((grads[n] - gold[n]).square().sum() for n in gold)
        return (difference / sum(g.square().sum() for g in gold.values())).sqrt().item(), grads

    stock, _ = errors()
    fused = fusing.fuse_layers(model)
    ours, _ = errors()
    fused.undo()
    # Interpreted kernels round down to bf16, so that their error is twice that of a GPU.
    assert 0 < ours < 2 * stock < 0.05, (family, ours, stock)


def check_checkpointing() -> None:
    """A checkpointed layer keeps no [T, intermediate], runs its MLP once, and learns the same."""
    model = copy.deepcopy(fused_llama())
    gold = gradients(model.train())
    model.gradient_checkpointing_enable()
    gated_mlp.CHUNK_BYTES = 5 * 48 * 4  # five rows
    runs, shapes, stock = [], [], gated_mlp._AnchoredMLP.forward
    gated_mlp._AnchoredMLP.forward = staticmethod(lambda *args: runs.append(1) or stock(*args))
    products = gated_mlp.forward_products
    gated_mlp.forward_products = lambda rows, ps: shapes.append(len(rows)) or products(rows, ps)
    ours = gradients(model)
    gated_mlp._AnchoredMLP.forward, gated_mlp.forward_products = staticmethod(stock), products
    assert len(runs) == 1 and max(shapes) == 5, (runs, shapes)
    for name, g in gold.items():
        assert (ours[name] - g).norm() <= 1e-5 * g.norm().clamp(min=1e-6), name


def check_sharded() -> None:
    """A model that FSDP2 has sharded already, as Accelerate's `prepare` leaves it, is fused too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gold, model = gradients(build("llama")), build("llama")
    for part in (*model.model.layers, model):
        fully_shard(part)
    fused = fusing.fuse_layers(model)
    assert len(fused.names) == COUNTS["llama"], fused.names
    for name, g in gradients(model).items():
        torch.testing.assert_close(g.full_tensor(), gold[name], rtol=1e-5, atol=1e-6)
    fused.undo()
    dist.destroy_process_group()


def check_adapters(dtype: torch.dtype) -> None:
    """Layers with LoRA adapters are fused, too, and compute what PEFT computes."""
    from peft import LoraConfig, get_peft_model

    model = build("llama").to(dtype)
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False}
    model = get_peft_model(model, LoraConfig(**options))

    def trained_gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            model(**BATCH).loss.backward()
        return {n: p.grad.float().clone() for n, p in model.named_parameters() if p.requires_grad}

    gold = trained_gradients()
    fused = fusing.fuse_layers(model)
    assert {"LlamaMLP", "LlamaAttention"} <= set(fused.names), fused.names
    calls, stock = [], fusion_patterns.linear_group
    fusion_patterns.linear_group = lambda *args: calls.append(1) or stock(*args)
    ours = trained_gradients()
    fusion_patterns.linear_group = stock
    assert len(calls) == 2, "q, k and v together, and the output"
    limit = 1e-5 if dtype == torch.float32 else 0.05
    for name, g in gold.items():
        assert (ours[name] - g).norm() <= limit * g.norm().clamp(min=1e-6), name
    with model.disable_adapter():
        logits = model(**BATCH).logits
    fused.undo()
    with model.disable_adapter():
        torch.testing.assert_close(model(**BATCH).logits, logits, rtol=1e-2, atol=1e-2)


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


def check_changes_of_an_activation_are_seen() -> None:
    """Whatever happens to `act_fn` after the layers were fused, the model computes with it."""
    changes = {
        "hook": lambda mlp: mlp.act_fn.register_forward_hook(lambda *given: given[-1] * 0.5),
        "module": lambda mlp: setattr(mlp, "act_fn", torch.nn.ReLU()),
        "forward": lambda mlp: setattr(mlp.act_fn, "forward", torch.tanh),
        "backward hook": lambda mlp: mlp.act_fn.register_full_backward_hook(
            lambda module, grads, _: (grads[0] * 0.5,)
        ),
    }
    changes = changes if WHOLE else {name: changes[name] for name in ("module", "backward hook")}
    unchanged = gradients(fused_llama())
    for name, change in changes.items():
        model, other = copy.deepcopy(fused_llama()), build("llama")
        for each in (model, other):
            change(each.model.layers[0].mlp)
        gold, ours = gradients(other), gradients(model)
        assert any(not torch.allclose(unchanged[n], g, rtol=0.01) for n, g in gold.items()), name
        for n, g in gold.items():
            assert (ours[n] - g).norm() <= 1e-5 * g.norm().clamp(min=1e-6), (name, n)


def check_settings_of_a_module_are_seen() -> None:
    """Those of one module among its like, and those that change after it was fused."""
    model = build("llama", num_hidden_layers=2)
    mlps = [layer.mlp for layer in model.model.layers]
    stock = type(mlps[0])

    class Scaled(stock):
        def forward(self, x):
            return stock.forward(self, x) * (1.0 if self.scale is None else self.scale[0])

    def losses() -> list[float]:
        found = []
        for scales in ((None, None), ([0.1], None), (None, (0.2,)), ((0.2,), (0.2,))):
            for mlp, scale in zip(mlps, scales, strict=True):
                mlp.scale = scale
            found.append(model(**BATCH).loss.item())
        return found

    for mlp in mlps:
        mlp.__class__ = Scaled
    gold = losses()
    mlps[0].scale, mlps[1].scale = [0.1], None
    assert "Scaled" not in fusing.fuse_layers(model).names
    mlps[0].scale = None
    assert "Scaled" in fusing.fuse_layers(model).names
    torch.testing.assert_close(losses(), gold, rtol=1e-5, atol=0)


def check_patches_of_classes_and_globals_are_seen() -> None:
    """Patches of what a fused model is made of, for that model and for the next one."""
    file = sys.modules[type(build("llama")).__module__]
    layer = build("llama").model.layers[0]
    parts = [type(x) for x in (layer, layer.mlp, layer.self_attn, layer.input_layernorm)]
    places = [*((part, "forward") for part in parts)]
    places += [(file, "apply_rotary_pos_emb"), (file, "eager_attention_forward")]
    places = places if WHOLE else [places[1], places[-2]]
    model, stock_model = fused_llama(), build("llama")
    unchanged = model(**BATCH).loss.item()
    for owner, name in places:
        stock = getattr(owner, name)
        setattr(owner, name, _bent(stock))
        later = build("llama")
        fusing.fuse_layers(later)
        gold, *ours = (m(**BATCH).loss.item() for m in (stock_model, model, later))
        setattr(owner, name, stock)
        torch.testing.assert_close(ours, [gold, gold], rtol=1e-5, atol=0)
        assert abs(gold - unchanged) > 1e-4, (owner, name)
    assert model(**BATCH).loss.item() == unchanged


def _bent(function):
    def bent(*args, **kwargs):
        out = function(*args, **kwargs)
        return (torch.sin(9 * out[0]), *out[1:]) if isinstance(out, tuple) else torch.sin(9 * out)

    return bent


def check_rows_wider_than_a_gain() -> None:
    """They raise what the stock norm raises: the kernel would read past the gain."""
    model = build("olmoe")  # its query norm has a gain of the hidden size, not of all heads
    for fuse in (lambda model: None, fusing.fuse_layers):
        fuse(model)
        try:
            model(**BATCH)
        except RuntimeError as error:
            assert "must match" in str(error), error
        else:
            raise AssertionError("a gain of 32 was read for rows of 64")
    layer = model.model.layers[0]
    assert fusion_patterns.DecoderLayerPart.forward(layer, None, torch.randn(1, 3, 64)) is None


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


def verify_in_one_precision() -> None:
    for module in (equivalence, fusion_patterns):
        module.trial_precisions = lambda dtype: [None]


if __name__ == "__main__":
    for family, count in COUNTS.items() if WHOLE else [("llama", 5)]:
        check_family(family, count)
    for family in ("llama", "qwen3") if WHOLE else ["qwen3"]:
        check_autocast(family)
    for dtype in (torch.float32, torch.bfloat16) if WHOLE else [torch.bfloat16]:
        check_adapters(dtype)
    if not WHOLE:  # what follows is not about rounding
        verify_in_one_precision()
    check_checkpointing()
    check_sharded()
    check_layers_that_are_not_fused()
    check_changes_of_an_activation_are_seen()
    check_settings_of_a_module_are_seen()
    check_patches_of_classes_and_globals_are_seen()
    check_rows_wider_than_a_gain()
    check_rotary_calls_the_kernel()
    check_a_wider_delta_stays_wide()
    check_nan_matches_nothing()
    print("finished")
