"""Products in fp8: right, isolated, the same weights elsewhere, and refused where they cannot run.

torchao emulates the products on a CPU: operands are cast and scaled as on a GPU (`emulated_fp8`).
"""

from __future__ import annotations

import importlib
import pickle
from copy import deepcopy

import pytest
import tiny_run
import torch
import torch.nn.functional as F
from nopad.inference import Engine, SamplingParams, batch_invariant
from nopad.trainer.layers import PreparedLayers, prepare_layers
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring.packing_check import measure_difference, measure_leak
from torch import nn

fp8 = importlib.import_module("nopad.trainer.layers.fp8")
class_swap = importlib.import_module("nopad.trainer.layers.class_swap")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def trained(**options) -> tuple[nn.Module, PreparedLayers]:
    model = tiny_run.model()
    attach_loss(model)
    return model, prepare_layers(model, CPU, **options)


def batches(count: int) -> list[dict]:
    return [tiny_run.collate(pack) for pack in tiny_run.packs(tiny_run.dataset(), count)]


def gradients(model: nn.Module, batch: dict) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_large_products_run_in_fp8_and_only_round(emulated_fp8):
    model, layers = trained(fp8=True)
    names = [n for n, m in model.named_modules() if fp8.Fp8Forward in map(type, forwards(m))]
    per_layer = {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                 "mlp.down_proj"}  # fmt: skip
    assert set(names) == {f"model.layers.{i}.{name}" for i in range(2) for name in per_layer}
    assert layers.way == "fp8" and layers.describe() == "compiled layers with fp8 products"
    stock = tiny_run.model()
    attach_loss(stock)
    for batch in batches(6):
        gap = tiny_run.distance(gradients(model, batch), gradients(stock, batch))
        assert 1e-3 < gap < 0.1
    assert emulated_fp8.frame_count == 1, "rows of all lengths share one graph"


def forwards(module: nn.Module) -> tuple:
    return class_swap.added_forwards(type(module))


def test_a_product_and_its_gradients_are_those_of_values_cast_by_row(emulated_fp8):
    torch.manual_seed(0)
    linear = nn.Linear(48, 32)
    x = torch.randn(1, 37, 48, requires_grad=True)
    out = fp8.Fp8Forward()(linear, None, x)
    d_out = torch.randn(1, 37, 32)
    out.backward(d_out)
    cast = [cast_by_row(t) for t in (x[0].detach(), linear.weight.detach())]
    assert torch.allclose(out[0], cast[0] @ cast[1].T + linear.bias, atol=1e-5)
    by_token, by_channel = cast_by_row(d_out[0]), cast_by_row(d_out[0].T)
    assert torch.allclose(x.grad[0], by_token @ cast_by_row(linear.weight.T).T, atol=1e-5)
    expected = by_channel @ cast_by_row(x[0].detach().T).T
    assert torch.allclose(linear.weight.grad, expected, atol=1e-5)
    assert torch.allclose(linear.bias.grad, d_out[0].sum(0), atol=1e-5)


def cast_by_row(x: torch.Tensor) -> torch.Tensor:
    """Cast each row to e4m3 with a power of two as scale, and back."""
    scale = torch.exp2(torch.floor(torch.log2(448 / x.detach().abs().amax(1, keepdim=True))))
    return (x.detach() * scale).to(torch.float8_e4m3fn).float() / scale


def test_sizes_of_products_are_multiples_of_16_for_any_row(emulated_fp8, monkeypatch):
    sizes = []

    class Product:
        @staticmethod
        def apply(x, weight, *settings):
            sizes.append((*x.shape, weight.shape[1]))
            return x @ weight

    forward = fp8.Fp8Forward()
    forward._product = Product
    linear = nn.Linear(48, 32)
    for tokens in (1, 15, 16, 17, 37):
        x = torch.randn(1, tokens, 48)
        assert torch.allclose(forward(linear, None, x), F.linear(x, linear.weight, linear.bias))
    assert [rows for rows, _, _ in sizes] == [16, 16, 16, 32, 48]
    assert all(size % 16 == 0 for row in sizes for size in row)


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
    peft = pytest.importorskip("peft")
    base = tiny_run.model()
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4)
    adapted = peft.get_peft_model(base, config)
    attach_loss(base)
    stock = deepcopy(adapted)
    prepare_layers(base, CPU, fp8=True)
    assert forwards(base.model.layers[0].self_attn.q_proj.base_layer)
    assert not forwards(base.model.layers[0].self_attn.q_proj.lora_A["default"])
    found = []
    for model in (adapted, stock):
        model(**batches(1)[0]).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert all("lora" in name for name in found[0])
    assert 0 < tiny_run.distance(*found) < 0.1
    assert base.model.layers[0].mlp.gate_proj.weight.grad is None


def test_a_copy_and_undo_keep_the_weights(emulated_fp8):
    model, layers = trained(fp8=True)
    batch = batches(1)[0]
    copy = pickle.loads(pickle.dumps(model.model.layers))
    assert isinstance(forwards(copy[0].mlp.up_proj)[0], fp8.Fp8Forward)
    layers.swapped.undo()
    assert not fp8.uses_fp8(model) and type(model.model.layers[0].mlp.up_proj) is nn.Linear
    stock = tiny_run.model()
    attach_loss(stock)
    assert torch.equal(model(**batch).loss, stock(**batch).loss)


def test_a_resumed_run_does_as_its_checkpoint_unless_it_is_told_otherwise(emulated_fp8):
    assert trained(saved="fp8")[1].way == "fp8"
    told = trained(saved="fp8", fp8=False)[1]
    assert told.way == "compiled"
    assert told.describe() == "compiled layers (the checkpoint was trained with fp8 layers)"
    assert trained(saved="fp8", layers="stock")[1].way == "stock"
    assert trained(saved="stock", fp8=True)[1].way == "fp8"
    assert trained(saved="compiled")[1].way == "compiled"


def test_layers_that_are_compiled_already_keep_their_products(emulated_fp8):
    model, _ = trained(fp8=True)
    assert prepare_layers(model, CPU).way == "fp8"
    with pytest.raises(
        ValueError, match=r"^fp8=False, but .* compiled already, with fp8: call und"
    ):
        prepare_layers(model, CPU, fp8=False)
    model, _ = trained(layers="compiled")
    with pytest.raises(ValueError, match=r"^fp8=True, but .* already, without fp8: call undo"):
        prepare_layers(model, CPU, fp8=True)


def test_batch_invariant_mode_refuses_fp8(emulated_fp8):
    with batch_invariant(64), pytest.raises(ValueError, match=r"^fp8=True: batch_invariant comp"):
        trained(fp8=True)
    model, _ = trained(fp8=True)
    with batch_invariant(64), pytest.raises(ValueError, match=r"^fp8=True: batch_invariant comp"):
        model(**batches(1)[0])


def test_a_machine_that_cannot_is_told_in_a_line(monkeypatch):
    model = tiny_run.model()
    told = "fp8 products need a GPU, and the model trains on cpu"
    with pytest.raises(ValueError, match=f"^fp8=True: {told}; omit fp8$"):
        prepare_layers(model, CPU, fp8=True)
    resumed = prepare_layers(tiny_run.model(), CPU, saved="fp8")
    assert resumed.way == "compiled" and told in resumed.describe()
    with pytest.raises(ValueError, match=r"^fp8=True: only compiled layers are faster in fp8"):
        prepare_layers(model, CPU, "stock", fp8=True)
    with pytest.raises(ValueError, match=r"^fp8=True: DeepSpeed gathers weights"):
        prepare_layers(model, CPU, fp8=True, obstacle="DeepSpeed gathers weights inside of layers")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert fp8.why_not_fp8(model, CUDA) == (
        "fp8 products need a GPU of compute capability 8.9 or newer, and NVIDIA A100 has 8.0"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(fp8, "find_spec", lambda name: None)
    told = "torchao is not installed (pip install 'nopad[fp8]')"
    assert fp8.why_not_fp8(model, CUDA) == told


def test_a_model_that_cannot_is_told_in_a_line(monkeypatch):
    monkeypatch.setattr(fp8, "why_not_device", lambda device: "")
    model = tiny_run.model()
    assert "no linear layer has the 8,388,608 weights" in fp8.why_not_fp8(model, CPU)
    monkeypatch.setattr(fp8, "MIN_WEIGHTS", 32 * 32)
    assert not fp8.why_not_fp8(model, CPU)
    attention = model.model.layers[1].self_attn
    attention.q_proj = nn.Linear(32, 40)
    assert fp8.why_not_fp8(model, CPU) == (
        "layers.1.self_attn.q_proj is 40 x 32, and fp8 products need multiples of 16"
    )
    attention.q_proj.weight = nn.Parameter(torch.zeros(40, 32, dtype=torch.uint8), False)
    assert fp8.why_not_fp8(model, CPU) == (
        "the weights are quantized (self_attn.q_proj.weight of a layer is torch.uint8)"
    )
