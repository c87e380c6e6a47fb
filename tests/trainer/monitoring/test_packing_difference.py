"""The check before the first step: right models pass in any precision, and every leak is seen."""

from __future__ import annotations

import os

import pytest
import tiny_run
import torch
from false_alarms import ALL_EXPERTS, DEVICE, PRECISIONS, build, check, data, run_trial
from nopad.attention.hf import (
    leaked_gradient,
    probe_positions,
    probe_rows,
    zero_weights_filled,
)
from nopad.collators import PackedCollator
from nopad.trainer.monitoring import check_run, packing_difference, preflight
from nopad.trainer.monitoring.packing_difference import measure_leak
from torch import nn

SEEDS = int(os.environ.get("NOPAD_CHECK_SEEDS", "200"))


def cells(names, all_precisions: str, precision: str) -> list:
    """Every name in this precision, and one name in all; the others are slow."""

    def marks(name: str, other: str) -> list:
        return [] if name == all_precisions or other == precision else [pytest.mark.slow]

    pairs = [(name, other) for name in names for other in PRECISIONS]
    return [pytest.param(*pair, marks=marks(*pair)) for pair in pairs]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *(("olmoe", precision) for precision in PRECISIONS),
        *(pytest.param(kind, precision, marks=pytest.mark.slow)
          for kind in ("gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3")
          for precision in PRECISIONS),
    ],
)  # fmt: skip
def test_experts_pass_in_any_precision(kind, precision):
    check(build(kind, layers=6), precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ALL_EXPERTS)
def test_no_seed_gives_a_false_alarm(kind, precision):
    trials = [(kind, precision, seed, DEVICE) for seed in range(SEEDS)]
    assert not [refusal for refusal, _ in map(run_trial, trials) if refusal]


class Fault(nn.Module):
    """Put in place of a layer's MLP: the MLP's output, and what the fault adds to it."""

    def __init__(self, mlp: nn.Module, fault):
        super().__init__()
        self.mlp, self.fault = mlp, fault

    def forward(self, x):
        return self.mlp(x) + self.fault(x)


def shifted(by: int):
    return lambda x: nn.functional.pad(x, (0, 0, by, 0))[:, :-by] * 0.1


def over_capacity(x):
    """Tokens beyond the first 64 of a row lose their part."""
    return -x * (torch.arange(x.shape[1], device=x.device) >= 64)[:, None]


def long_rows(x):
    return x if x.shape[1] > 100 else torch.zeros_like(x)


def chosen_tokens(x):
    """Experts choose half of the tokens of the row: no gradient shows who was chosen."""
    scores = x.detach().sum(-1)
    return x * (scores >= scores.median())[..., None]


def decayed(x):
    """A state that ends by a huge decay: no gradient is left, but values are."""
    return x.detach().cumsum(1) * 0.1


class ForwardOnly(torch.autograd.Function):
    """The forward of a kernel mixes tokens, and its backward does not."""

    @staticmethod
    def forward(ctx, x):
        return x.roll(1, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad


FAULTS = {
    "a shift by 32 tokens": shifted(32),
    "a shift by 64 tokens": shifted(64),
    "a capacity of 64 tokens": over_capacity,
    "another behaviour beyond 100 tokens": long_rows,
    "experts that choose tokens": chosen_tokens,
    "a state that keeps its values": decayed,
    "a kernel whose backward is right": ForwardOnly.apply,
}


@pytest.mark.parametrize(
    ("fault", "precision"), cells(FAULTS, "a state that keeps its values", "fp32")
)
def test_every_fault_is_seen(fault, precision):
    model = build()
    layer = model.model.layers[0]
    layer.mlp = Fault(layer.mlp, FAULTS[fault])
    with pytest.raises(ValueError, match=r"see each other|differently than alone"):
        check(model, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("weight", [0.01, 1e-4])
def test_a_weak_leak_is_seen(weight, precision):
    model = build("mixtral")
    layer = model.model.layers[0]
    layer.mlp = Fault(layer.mlp, lambda x: x.mean(1, keepdim=True) * weight)
    with pytest.raises(ValueError, match="see each other"):
        check(model, precision)


def test_a_leak_behind_weights_that_are_zero_is_seen():
    model = tiny_run.model("sdpa")
    before = tiny_run.digest(model)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
    zeroed = tiny_run.digest(model)
    row = PackedCollator()([{"input_ids": [3, 4, 5]}, {"input_ids": [6, 7, 8]}])
    row = {"input_ids": row["input_ids"], "use_cache": False}  # without boundaries
    assert leaked_gradient(model, row, [3, 3]) == 0.0
    with zero_weights_filled(model):
        assert leaked_gradient(model, row, [3, 3]) > 0.0
    assert tiny_run.digest(model) == zeroed != before


def test_padding_is_apart_from_documents():
    model = build()
    batch = PackedCollator()([{"input_ids": [3, 4, 5]}, {"input_ids": [6, 7, 8]}])
    batch = {name: value for name, value in batch.items() if name != "labels"}
    assert leaked_gradient(model, batch, [3, 3]) == 0.0
    row = {**batch, "cu_seq_lens_q": torch.tensor([0, 6], dtype=torch.int32), "max_length_q": 6}
    assert leaked_gradient(model, row, [3]) == 0.0, "padding after a document is not read"
    row["input_ids"] = row["input_ids"].flip(1)
    model.model.layers[0].mlp = Fault(model.model.layers[0].mlp, lambda x: x.flip(1))
    assert leaked_gradient(model, row, [3]) > 0.0


def test_the_check_leaves_no_trace():
    model = build()
    model.train()
    model.model.layers[1].eval()
    before, state = [m.training for m in model.modules()], tiny_run.digest(model)
    random = torch.get_rng_state()
    check_run(model, data())
    assert [m.training for m in model.modules()] == before and tiny_run.digest(model) == state
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


def test_dropout_is_not_taken_for_a_difference():
    model = build("opt", dropout=0.5)
    check_run(model, data())


@pytest.mark.parametrize("longest", [1, 20])
def test_a_long_row_of_short_samples_has_few_logits_and_shows_a_leak(longest):
    (row, _), model = probe_rows(None, 16384, longest)[0], build()
    places, counts = probe_positions(row)
    assert len(places) < 4096 and all(counts[-3:]) and len(counts) == len(row)
    row = probe_rows(None, 200, longest)[0][0]
    assert measure_leak(model, lengths=row) == 0.0
    layer = model.model.layers[0]
    layer.mlp = Fault(layer.mlp, shifted(1))
    assert measure_leak(model, lengths=row) > 0.0


@pytest.mark.parametrize("count", [2, 3, 6, 10])
def test_any_two_documents_are_told_apart(count):
    """Several are examined at a time; a leak from any one to any other shows."""
    model, lengths = build(layers=1), [2] * count
    layer = model.model.layers[0]
    mlp, pairs = layer.mlp, [(i, j) for i in range(count) for j in range(count) if i != j]
    for seen, by in pairs if count < 6 else pairs[:: count // 2]:
        layer.mlp = Fault(mlp, one_to_another(2 * seen, 2 * by))
        assert measure_leak(model, lengths=lengths) > 0.0, (seen, by)


def one_to_another(seen: int, by: int):
    def fault(x):
        moved = torch.zeros_like(x)
        moved[:, by] = x[:, seen]
        return moved

    return fault


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_part_of_the_check(reentrant):
    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert measure_leak(model) == 0.0
    layer = model.model.layers[0]
    layer.mlp = Fault(layer.mlp, shifted(1))
    assert measure_leak(model) > 0.0


def test_a_check_in_inference_mode_sees_the_same():
    right, wrong = build("mixtral"), build()
    layer = wrong.model.layers[0]
    layer.mlp = Fault(layer.mlp, shifted(1))
    with torch.inference_mode():
        check_run(right, data())
        with pytest.raises(ValueError, match="see each other"):
            check_run(wrong, data())


@pytest.mark.parametrize("found", ["lets packed samples see each", "computes packed samples diff"])
def test_what_one_rank_finds_stops_all_of_them(found, monkeypatch):
    """The others would wait for it in the next collective."""
    module = preflight if found.startswith("lets") else packing_difference
    monkeypatch.setattr(module, "gather_objects", lambda own: [own, 0.25])
    with pytest.raises(ValueError, match=f"{found}.*0.25"):
        check_run(build(), data())


def test_a_model_that_is_not_trained_keeps_no_long_row(monkeypatch):
    rows = []
    monkeypatch.setattr(preflight, "measure_leak", lambda *given: rows.append(sum(given[3])) or 0.0)
    check_run(build(), data())
    assert max(rows) > 200
    rows.clear()
    check_run(build().requires_grad_(False), data())
    assert max(rows) <= 32


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_vocabulary_that_is_masked_in_part_is_right_and_hides_nothing(value):
    model = build()
    masked = torch.arange(model.config.vocab_size, device=DEVICE) % 3 == 0
    model.lm_head.register_forward_hook(lambda *given: given[-1].masked_fill(masked, value))
    check_run(model, data())
    layer = model.model.layers[0]
    layer.mlp = Fault(layer.mlp, lambda x: 0.5 * x.mean(1, keepdim=True).detach())
    with pytest.raises(ValueError, match=r"differently than alone \(logits differ by \d\.?\d*\)"):
        check_run(model, data())


def test_a_convolution_that_starts_as_the_identity_is_seen():
    model = build()
    kernel = nn.Parameter(torch.tensor([-0.0, 0.0, 1.0], device=DEVICE))
    model.register_parameter("kernel", kernel)

    def convolved(x):
        return sum(k * x.roll(2 - i, 1) for i, k in enumerate(kernel)) - x

    layer = model.model.layers[0]
    layer.mlp = Fault(layer.mlp, convolved)
    with pytest.raises(ValueError, match="see each other"):
        check_run(model, data())
    assert kernel.tolist() == [0, 0, 1] and kernel[0].signbit(), "to the bit"
    kernel.requires_grad_(False)  # it stays the identity
    check_run(model, data())
