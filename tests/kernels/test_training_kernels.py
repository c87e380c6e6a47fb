"""The Triton kernels of training, interpreted on a CPU, against plain PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nopad.collators import PackedCollator
from nopad.trainer.fused import ClippedAdamW, compile_layers, fuse_layers
from nopad.trainer.loss import attach_loss, linear_cross_entropy
from nopad.trainer.loss.label_count import ask
from transformers import LlamaConfig, LlamaForCausalLM

LOSS_AND_STEP = """
import torch
from nopad.trainer.loss.label_count import ask
from nopad.trainer.loss.cross_entropy import _losses_and_gradient
from nopad.kernels.cross_entropy import losses_and_gradient, scaled

torch.manual_seed(0)
for width in (5, 64, 8200):
    logits, weights = 3 * torch.randn(4, width), torch.rand(4)
    targets = torch.randint(0, width, (4,))
    targets[1] = -100
    for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.02)):
        ours, gold = logits.clone(), logits.clone()
        losses = losses_and_gradient(ours, targets, weights, smoothing, z_loss)
        exact = _losses_and_gradient(gold, targets, weights, smoothing, z_loss)
        torch.testing.assert_close(losses, exact, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours, gold, rtol=1e-6, atol=1e-6)
x, by = torch.randn(70, 80), torch.tensor(1 / 3)
torch.testing.assert_close(scaled(x, by, x.dtype), x / 3, rtol=1e-6, atol=0)

from nopad.trainer.fused import adamw

adamw._fusible = lambda p: True  # the kernel, although this is no GPU
torch.manual_seed(0)
shapes = ((70, 80), (3,), (0,))
ours = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
gold = [torch.nn.Parameter(p.detach().clone()) for p in ours]
rule = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
a = adamw.ClippedAdamW(ours, max_norm=1.0, **rule)
b = torch.optim.AdamW(gold, **rule)
for step in range(4):
    for p, q in zip(ours, gold):
        p.grad = torch.randn_like(p) * (1e-4 if step == 2 else 1.0)  # clipped, and not
        q.grad = p.grad.clone()
    before = [p.grad.clone() for p in ours]
    a.step()
    norm = torch.nn.utils.clip_grad_norm_(gold, 1.0)
    b.step()
    assert torch.equal(a.norm, norm)
    assert all(torch.equal(p.grad, g) for p, g in zip(ours, before)), "gradients are only read"
for p, q in zip(ours, gold):
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    assert a.state[p].keys() == b.state[q].keys()
    for name in a.state[p]:
        torch.testing.assert_close(a.state[p][name], b.state[q][name], rtol=1e-6, atol=1e-7)
for p, q in zip(ours, gold):
    p.grad = torch.randn_like(p)
    q.grad = p.grad.clone()
ours[1].grad[0] = gold[1].grad[0] = float("nan")
a.step()
torch.nn.utils.clip_grad_norm_(gold, 1.0)
b.step()
for p, q in zip(ours, gold):
    assert p.isnan().all() and q.isnan().all(), "a norm that is no number leaves nothing half alive"
print("finished")
"""

FUSED = """
import copy
import torch
from nopad.collators import PackedCollator
import sys
from nopad.trainer.fused import attention_part, layer_part, mlp_part, norm_part
from transformers import AutoConfig, AutoModelForCausalLM

fusing = sys.modules["nopad.trainer.fused.fuse_layers"]
for module in (fusing, norm_part, mlp_part, layer_part, attention_part):
    module.serves = lambda x: True  # the kernels, although this is no GPU
small = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=64)
batch = PackedCollator()([{"input_ids": list(range(1, n))} for n in (9, 5, 7)])

def gradients(model):
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}

expected = {"llama": 5, "granite": 4, "gemma2": 2, "cohere": 2}
# granite scales its residuals, gemma's norms have 1 + w, cohere turns by pairs
for family, count in expected.items():
    torch.manual_seed(0)
    more = {"residual_multiplier": 0.5} if family == "granite" else {}
    config = AutoConfig.for_model(family, **small, **more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    gold, names = gradients(model), list(model.state_dict())
    kinds = [type(part) for part in model.modules()]
    fused = fusing.fuse_layers(model)
    assert len(fused.names) == count, fused.names
    assert list(model.state_dict()) == names
    again = fusing.fuse_layers(model)  # finds everything fused, and leaves it so
    assert sorted(again.names) == sorted(fused.names)
    again.undo()
    assert not any(hasattr(kind, fusing.FUSED) for part in model.modules()
                   for kind in type(part).__mro__[1:]), "fused twice"
    ours = gradients(model)
    scale = max(g.abs().max() for g in gold.values())
    apart = torch.stack([(ours[n] - gold[n]).abs().max() for n in gold]).max()  # max() loses NaN
    assert apart / scale < 1e-6, family
    for p in copy.deepcopy(model).parameters():
        p.data.zero_()  # a copy is a model of its own
    assert all(torch.equal(g, ours[n]) for n, g in gradients(model).items())
    fused.undo()
    assert [type(part) for part in model.modules()] == kinds
    if family == "llama":
        mlp, norm, x = model.model.layers[0].mlp, model.model.norm, torch.randn(1, 3, 32)
        mlp.gate_proj.register_forward_pre_hook(lambda *_: None)
        found = fusing.fuse_layers(model)
        assert "LlamaMLP" not in found.names
        torch.testing.assert_close(norm(hidden_states=x), norm(x))
        found.undo()
        stock = type(model.model.layers[0])

        class Forgetful(stock):
            def forward(self, hidden_states, position_ids=None, **options):
                return stock.forward(self, hidden_states, **options)

        model.model.layers[0].__class__ = Forgetful
        assert "LlamaRMSNorm" in (found := fusing.fuse_layers(model)).names
        assert "Forgetful" not in found.names, "its attention is given something else"
        found.undo()

from nopad.kernels.norm import passed_norm

x, delta, weight = torch.randn(2, 32).bfloat16(), torch.randn(2, 32), torch.randn(32).bfloat16()
total, out = passed_norm(x, delta, weight, 1e-6)
assert torch.equal(total, x + delta) and out.dtype == torch.float32, "what is wider stays so"
gold = torch.nn.functional.rms_norm(x + delta, (32,), eps=1e-6) * weight
torch.testing.assert_close(out, gold)

def stock(x):
    return x * 1.0, x * 1.0

def broken(x):
    return x * 1.0, x * float("nan")

x = torch.ones(3, requires_grad=True)
assert fusing.agree(stock, stock, [x], []) and not fusing.agree(stock, broken, [x], [])
print("finished")
"""


@pytest.mark.parametrize("script", [LOSS_AND_STEP, FUSED], ids=["loss and step", "fused layers"])
def test_kernels_compute_what_pytorch_computes(script):
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path.home(),
    )
    assert run.returncode == 0 and "finished" in run.stdout, run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_bf16_step_is_as_near_to_fp32_as_without_our_kernels(compiled):
    tokens = torch.randint(1, 300, (1, 500), generator=torch.Generator().manual_seed(0))
    collator = PackedCollator()
    rows = [{"input_ids": part.tolist()} for part in tokens[0].split([90, 200, 210])]
    batch = {k: v.cuda() if torch.is_tensor(v) else v for k, v in collator(rows).items()}

    def gradients(dtype, prepare) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=300, hidden_size=128, intermediate_size=320,
                             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                             attn_implementation="sdpa")  # fmt: skip
        model = LlamaForCausalLM(config).cuda().to(dtype)
        prepare(model)
        model(**batch).loss.backward()
        return {name: p.grad.float() for name, p in model.named_parameters()}

    def ours(model) -> None:
        attach_loss(model)
        assert compiled or len(fuse_layers(model).names) == 5
        if compiled:
            compile_layers(model)

    gold = gradients(torch.float32, lambda model: None)
    low = gradients(torch.bfloat16, lambda model: None)
    for name, gradient in gradients(torch.bfloat16, ours).items():
        wrong, allowed = ((g[name] - gold[name]).norm() for g in ({name: gradient}, low))
        assert wrong <= 2 * allowed, name


@pytest.mark.gpu
def test_a_step_on_the_gpu_is_that_of_torch_after_clipping():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(s, device="cuda")) for s in ((1000, 30), (77,))]
    gold = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    a, b = ClippedAdamW(ours, lr=0.01), torch.optim.AdamW(gold, lr=0.01, fused=True)
    for _ in range(3):
        for p, q in zip(ours, gold, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        torch.nn.utils.clip_grad_norm_(gold, 1.0)
        b.step()
    for p, q in zip(ours, gold, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_rows_that_count_are_picked_without_a_wait_and_all_taken_inside_a_cuda_graph():
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64), torch.randn(500, 64)
    targets = torch.randint(0, 500, (300,)).where(torch.rand(300) < 0.4, -100)

    def gradients(hidden, weight, targets, told) -> tuple[torch.Tensor, ...]:
        count = ask(targets) if told else None
        inputs = hidden.requires_grad_(), weight.requires_grad_()
        counted = None if count is None else count.read()
        total, losses = linear_cross_entropy(*inputs, targets, num_labels=counted)
        return losses, *torch.autograd.grad(total, inputs)

    gold = gradients(hidden, weight, targets, True)
    given = [x.detach().cuda() for x in (hidden, weight, targets)]
    found = [gradients(*given, told=False)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found.append(gradients(*given, told=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(gradients(*given, told=True))
    graph.replay()
    for ours in found:
        for a, b in zip(ours, gold, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)
