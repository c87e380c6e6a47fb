"""Changes that raise no version counter are noticed before cached keys are used."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from nopad.inference import Engine
from nopad.inference.live_model.weights_version import WeightsVersion, sample_stride
from torch.nn.modules.module import _global_forward_hooks, register_module_forward_hook

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
PROMPT = list(range(3, 60))


@pytest.fixture
def model(tiny):
    yield copy.deepcopy(tiny("llama"))
    _global_forward_hooks.clear()


def rewrite_all_but_the_first_column(model):
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data[:, 1:] = weight.data[:, 1:].flip(0)


def rewrite_a_quarter_of_the_rows(model):
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data[8:16] *= -1


def rewrite_a_quarter_of_the_columns(model):
    weight = model.model.layers[1].self_attn.k_proj.weight
    weight.data[:, 20:28] *= -3


def add_a_hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, out: out * 0.5)


def add_a_pre_hook(model):
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (args[0] * -1,))


def add_a_hook_of_all_modules(model):
    mlp = model.model.layers[0].mlp
    register_module_forward_hook(lambda module, args, out: out * 2 if module is mlp else None)


def replace_a_forward(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x, plain=mlp.forward: plain(x) * 2


def replace_the_class(model):
    norm = model.model.layers[0].input_layernorm
    norm.__class__ = type("Doubled", (type(norm),), {"forward": lambda self, x: x * 2})


def change_the_scale(model):
    model.model.layers[0].self_attn.scaling *= 3


def change_the_config(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def step_a_fused_optimizer(model):
    """Fused optimizers raise no version counter."""
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2, fused=True)
    version = weight._version
    optimizer.step()
    optimizer.zero_grad()
    assert weight._version == version


CHANGES = [
    rewrite_all_but_the_first_column, rewrite_a_quarter_of_the_rows, add_a_hook, add_a_pre_hook,
    rewrite_a_quarter_of_the_columns, add_a_hook_of_all_modules, replace_a_forward,
    replace_the_class, change_the_scale, change_the_config, step_a_fused_optimizer,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_cached_key_is_used_after(model, change):
    engine = Engine(model, page_size=16)
    engine.generate([PROMPT], GREEDY)
    change(model)
    (got,) = engine.generate([PROMPT], {**GREEDY, "logprobs": 0})
    (want,) = Engine(model, page_size=16).generate([PROMPT], {**GREEDY, "logprobs": 0})
    assert got == want


SEEN_WHILE_BUSY = [change for change in CHANGES if not change.__name__.startswith("rewrite")]


@pytest.mark.parametrize("change", SEEN_WHILE_BUSY, ids=lambda change: change.__name__)
def test_a_request_to_a_busy_engine_uses_no_key_from_before(model, change):
    engine = Engine(model, page_size=16)
    engine.generate([PROMPT], GREEDY)
    engine.add_request([5, 6, 7], {**GREEDY, "max_tokens": 40})
    engine.step()
    change(model)
    params = {**GREEDY, "logprobs": 0}
    added, done = engine.add_request(PROMPT, params), {}
    while added not in done:
        done |= {e.request_id: e.completion for e in engine.step() if e.completion is not None}
    (want,) = Engine(model, page_size=16).generate([PROMPT], params)
    got = [token.logprob for token in done[added].logprobs]
    assert done[added].token_ids == want.token_ids
    assert got == pytest.approx([token.logprob for token in want.logprobs], abs=1e-4)


def test_the_scale_of_running_requests_is_the_models(model):
    engine = Engine(model, page_size=16)
    engine.add_request([5, 6, 7], {**GREEDY, "max_tokens": 40})
    engine.step()
    change_the_scale(model)
    (want,) = Engine(model, page_size=16).generate([PROMPT], GREEDY)
    assert engine.generate([PROMPT], GREEDY) == [want]


def test_what_did_not_change_keeps_its_prefixes(model):
    engine = Engine(model, page_size=16)
    model.train()
    for _ in range(3):
        engine.generate([PROMPT], GREEDY)
        model.config.use_cache = not model.config.use_cache
    assert engine.stats.prefix_hit_tokens == 2 * 48


@pytest.mark.parametrize(
    "shape", [(64, 64), (8, 4096), (4096, 8), (100,), (7, 3, 64), (1, 1), (3,)]
)
def test_a_sample_is_spread_over_rows_and_columns(shape):
    count, columns = torch.Size(shape).numel(), shape[-1]
    stride = sample_stride(count, columns)
    taken = torch.arange(0, count, stride)
    gap = max(1, count // 24)
    edges = [-1, *taken.tolist(), count]
    assert all(b - a <= gap + 1 for a, b in pairwise(edges))
    seen = sorted(set((taken % columns).tolist()))
    assert len(taken) < 300
    limit = max(1, columns // 8)
    assert all(b - a <= limit + 1 for a, b in pairwise([-1, *seen, columns]))


def test_a_look_at_a_model_takes_no_launch_per_tensor(model):
    """All samples are views of their tensors: one copy gathers them."""
    version, seen = WeightsVersion(model), []
    with torch.profiler.profile() as profile:
        version.refresh()
    seen = [event.name for event in profile.events()]
    assert seen.count("aten::cat") == 1 and "aten::index" not in seen and "aten::take" not in seen
