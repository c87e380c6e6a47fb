"""Experts by grouped products: only where a trial gives the same."""

from __future__ import annotations

import tiny_run
import torch
from nopad.trainer.layers.class_swap import SwappedLayers
from nopad.trainer.layers.equivalence import outputs_match, trial_copy, trial_input
from nopad.trainer.layers.experts import experts_forward, group_experts, grouped_forward
from torch import nn


def grouped(model) -> bool:
    swapped = SwappedLayers()
    group_experts(model, swapped, torch.device("cpu"))
    return bool(swapped._swaps)


def test_results_of_another_structure_or_dtype_do_not_match():
    x = trial_input(torch.ones(1, dtype=torch.bfloat16), 9)
    assert outputs_match(torch.sin, torch.sin, [x], [])
    assert not outputs_match(lambda x: (x.sin(),), torch.sin, [x], []), "a tuple and its tensor"
    assert not outputs_match(lambda x: x.float().sin(), torch.sin, [x], []), "a wider result"


def test_what_tf32_rounds_is_forgiven_and_a_multiplier_is_not():
    x = trial_input(torch.ones(1), 9)
    for factor, alike in ((1.0003, True), (0.998, False)):
        assert outputs_match(torch.sin, lambda x, factor=factor: x.sin() * factor, [x], []) == alike


def test_a_function_that_draws_random_numbers_matches_nothing():
    x, state = trial_input(torch.ones(1), 9), torch.get_rng_state()
    assert not outputs_match(torch.sin, lambda x: nn.functional.dropout(x, 1e-9).sin(), [x], [])
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_of_zeros_do_not_hide_what_depends_on_them():
    linear = nn.Linear(3, 3).bfloat16()
    nn.init.zeros_(linear.weight)
    copy = trial_copy(linear, torch.device("cpu"))
    assert copy.weight.dtype == torch.float32 and copy.weight.any() and not linear.weight.any()


def test_experts_that_compute_something_else_stay_as_they_are(monkeypatch):
    model = tiny_run.mixture()
    experts = next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
    stock = type(experts).forward
    assert grouped(tiny_run.mixture())
    monkeypatch.setattr(type(experts), "forward", lambda *args: 0.99 * stock(*args))
    assert not grouped(tiny_run.mixture())


def test_a_way_that_the_user_has_chosen_stays():
    model = tiny_run.mixture()
    for module in model.modules():
        if "num_experts" in vars(module) and hasattr(module, "config"):
            module.config._experts_implementation = "deepgemm"
    assert not grouped(model)


def test_experts_whose_weights_are_in_part_on_other_ranks_stay():
    model = tiny_run.mixture()
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.down_proj = nn.Parameter(module.down_proj[:1].detach())
    assert not grouped(model)


def test_under_autocast_experts_run_in_its_dtype():
    model = tiny_run.mixture()
    experts = next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
    x = torch.randn(5, experts.down_proj.shape[1])
    chosen = torch.tensor([[0, 1]] * 5)
    with torch.autocast("cpu", torch.bfloat16):
        out = experts_forward(experts, x, chosen, torch.full((5, 2), 0.5))
    exact = experts_forward(experts, x, chosen, torch.full((5, 2), 0.5))
    error = (out - exact).norm() / exact.norm()
    assert out.dtype == torch.float32 and 1e-4 < error < 2e-2


def test_experts_of_the_oldest_transformers_lack_some_attributes():
    model = tiny_run.mixture()
    experts = next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
    inputs = torch.randn(5, 32), torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    out = experts_forward(experts, *inputs)
    for name in ("has_post_expert_norm", "_is_expert_parallel"):
        vars(experts).pop(name, None)
    assert torch.equal(grouped_forward(experts, None, *inputs), out)
