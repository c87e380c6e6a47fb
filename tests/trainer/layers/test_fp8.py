"""Products in fp8: right, isolated, the same weights elsewhere, and refused where they cannot run.

On a CPU the casts are those of a GPU; the products of their results are in fp32 (`emulated_fp8`).
"""

from __future__ import annotations

import importlib
import pickle
from copy import deepcopy
from types import SimpleNamespace

import pytest
import tiny_run
import torch
from nopad.inference import Engine, SamplingParams, batch_invariant
from nopad.trainer.layers import PreparedLayers, prepare_layers
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring.packing_difference import measure_difference, measure_leak
from torch import nn

class_swap = importlib.import_module("nopad.trainer.layers.class_swap")
fp8 = importlib.import_module("nopad.trainer.layers.fp8")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def trained(**options) -> tuple[nn.Module, PreparedLayers]:
    model = tiny_run.model()
    attach_loss(model)
    return model, prepare_layers(model, CPU, **options)


def batches(count: int) -> list[dict]:
    return [tiny_run.collate(pack) for pack in tiny_run.packs(tiny_run.dataset(), count)]


def gradients(model: nn.Module, batch: dict, autocast: bool = False) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("autocast", [False, True])
def test_large_products_run_in_fp8_and_only_round(emulated_fp8, autocast):
    model, layers = trained(fp8=True)
    assert layers.way == "fp8" and layers.describe() == "compiled layers with fp8 products"
    stock = tiny_run.model()
    attach_loss(stock)
    for batch in batches(6):
        gap = tiny_run.distance(gradients(model, batch, autocast), gradients(stock, batch))
        assert 1e-3 < gap < 0.1
    large = [p for p in model.model.layers.parameters() if p.numel() >= 32 * 32]
    assert len(emulated_fp8.products) == 6 * 3 * len(large), "one forward and both gradients"
    assert emulated_fp8.frame_count == 1, "rows of all lengths share one graph"


def product():
    return importlib.import_module("nopad.trainer.layers.fp8_product")


def test_a_product_and_its_gradients_are_those_of_values_that_were_cast(emulated_fp8):
    torch.manual_seed(0)
    x, weight = torch.randn(37, 48), torch.randn(32, 48)
    x[5], x[7] = 0, x[7] * 1e4
    x.requires_grad_(), weight.requires_grad_()
    d_out = torch.randn(37, 32) * torch.logspace(-8, 0, 37)[:, None]
    out = product().Fp8Product.apply(x, weight)
    out.backward(d_out)
    x8, w8, d8 = restored(x, True), restored(weight), restored(d_out, True)
    assert close(out, x8 @ w8.T) and close(x.grad, d8 @ w8)
    assert close(weight.grad, d8.T @ x8)
    assert not out[5].any()


def test_a_product_that_has_its_dtype_is_not_cast():
    """Seen in the gradients with torch 2.11 alone."""
    product()._rounded(SimpleNamespace(dtype=torch.bfloat16), torch.bfloat16)  # has no `to`


def restored(x: torch.Tensor, per_row: bool = False) -> torch.Tensor:
    values, scales = product().cast(x.detach(), per_row)
    assert torch.equal(scales.log2(), scales.log2().round())
    return values.float() * scales


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() < 0.004 * expected.norm())  # bf16


def test_a_token_that_outweighs_all_others_leaves_them_their_part(emulated_fp8):
    torch.manual_seed(0)
    x, weight = torch.randn(64, 32), torch.zeros(32, 32, requires_grad=True)
    d_out = torch.randn(64, 32)
    x[0], d_out[0] = x[0] * 2**15, d_out[0] * 2**-15
    product().Fp8Product.apply(x, weight).backward(d_out)
    gap = weight.grad - d_out.T @ x
    assert gap.norm() < 0.06 * weight.grad.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_row_alone(value, emulated_fp8):
    x = torch.randn(3, 16)
    x[1, 2] = value
    out = product().Fp8Product.apply(x, torch.randn(16, 16))
    assert out[[0, 2]].isfinite().all() and not out[1].isfinite().any()


def test_documents_stay_isolated_and_the_start_check_passes(emulated_fp8):
    model, _ = trained(fp8=True)
    assert measure_leak(model) == 0.0
    for lengths in ([3, 9, 17, 3], [30, 2], [11, 11, 10]):
        assert measure_difference(model, None, lengths) == 0.0


def test_evaluation_and_generation_run_the_plain_weights(emulated_fp8):
    model, _ = trained(fp8=True)
    stock, batch = tiny_run.model(), batches(1)[0]
    attach_loss(stock)
    for each in (model, stock):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for p in each.parameters():
            p.grad = torch.full_like(p, 0.01)
        optimizer.step()
        each.train()
    assert not torch.equal(model(**batch).loss, stock(**batch).loss)
    prompts, greedy = [[5, 9, 2], [7] * 9], SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    ours, theirs = (Engine(each).generate(prompts, greedy) for each in (model, stock))
    assert [o.token_ids for o in ours] == [o.token_ids for o in theirs]
    assert [o.logprobs for o in ours] == [o.logprobs for o in theirs]
    assert list(model.state_dict()) == list(stock.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch).loss, stock.eval()(**batch).loss)


def test_adapters_train_on_products_of_the_base_in_fp8(emulated_fp8):
    peft = pytest.importorskip("peft", reason="adapters are PEFT's")
    base = tiny_run.model()
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4)
    adapted = peft.get_peft_model(base, config)
    attach_loss(base)
    stock, tokens = deepcopy(adapted), batches(1)[0]["input_ids"].numel()
    prepare_layers(base, CPU, fp8=True)
    found = []
    for model in (adapted, stock):
        model(**batches(1)[0]).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert all("lora" in name for name in found[0])
    assert 0 < tiny_run.distance(*found) < 0.1
    assert base.model.layers[0].mlp.gate_proj.weight.grad is None
    assert emulated_fp8.products
    assert {rows for rows, _, _ in emulated_fp8.products} == {tokens}, "no gradient of a weight"


def test_a_copy_and_undo_keep_the_weights(emulated_fp8):
    model, layers = trained(fp8=True)
    batch, stock = batches(1)[0], tiny_run.model()
    attach_loss(stock)
    copy = pickle.loads(pickle.dumps(model.model.layers))
    assert [forward.fp8 for forward in class_swap.added_forwards(type(copy[0]))] == [True]
    assert not torch.equal(model(**batch).loss, stock(**batch).loss)
    layers.swapped.undo()
    assert torch.equal(model(**batch).loss, stock(**batch).loss)


def test_a_resumed_run_does_as_it_is_told(emulated_fp8):
    assert trained(saved="fp8", fp8=True)[1].describe() == "compiled layers with fp8 products"
    told = trained(saved="fp8")[1].describe()
    assert told == "compiled layers (the checkpoint was trained with fp8 layers)"
    told = trained(saved="stock", fp8=True)[1].describe()
    assert told.endswith("fp8 products (the checkpoint was trained with stock layers)")


def test_layers_that_are_compiled_already_keep_their_products(emulated_fp8):
    model, _ = trained(fp8=True)
    assert prepare_layers(model, CPU, fp8=True).way == "fp8"
    with pytest.raises(ValueError, match=r"^fp8=False, but .* already with fp8=True: call undo"):
        prepare_layers(model, CPU)
    model, _ = trained(layers="compiled")
    with pytest.raises(ValueError, match=r"^fp8=True, but .* already with fp8=False: call undo"):
        prepare_layers(model, CPU, fp8=True)


def test_batch_invariant_mode_refuses_fp8(emulated_fp8):
    model, _ = trained(fp8=True)
    with batch_invariant(64), pytest.raises(ValueError, match=r"^fp8=True: batch_invariant needs"):
        model(**batches(1)[0])


def test_a_machine_that_cannot_is_told_in_a_line(monkeypatch):
    model = tiny_run.model()
    told = "fp8 products need a GPU, and the model trains on cpu"
    with pytest.raises(ValueError, match=f"^fp8=True: {told}; omit fp8$"):
        prepare_layers(model, CPU, fp8=True)
    with pytest.raises(ValueError, match=r"^fp8=True: only compiled layers are faster in fp8"):
        prepare_layers(model, CPU, "stock", fp8=True)
    with pytest.raises(ValueError, match=r"^fp8=True: DeepSpeed gathers weights"):
        prepare_layers(model, CPU, fp8=True, obstacle="DeepSpeed gathers weights inside of layers")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert fp8.why_not_fp8(model, CUDA) == (
        "fp8 products need a GPU of compute capability 8.9 or newer, and NVIDIA A100 has 8.0"
    )


def test_a_model_that_cannot_is_told_in_a_line(monkeypatch):
    monkeypatch.setattr(fp8, "why_not_device", lambda device: "")
    model = tiny_run.model()
    assert "no linear layer has the 4,194,304 weights" in fp8.why_not_fp8(model, CPU)
    monkeypatch.setattr(fp8, "MIN_WEIGHTS", 32 * 32)
    assert not fp8.why_not_fp8(model, CPU)
    attention = model.model.layers[1].self_attn
    attention.q_proj = nn.Linear(32, 40)
    assert fp8.why_not_fp8(model, CPU) == (
        "layers.1.self_attn.q_proj is 40 x 32, and fp8 products need multiples of 16"
    )
    attention.q_proj.weight = nn.Parameter(torch.zeros(40, 32, dtype=torch.uint8), False)
    assert fp8.why_not_fp8(model, CPU) == (
        "the weights are quantized (layers.1.self_attn.q_proj.weight is torch.uint8)"
    )
