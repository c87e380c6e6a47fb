"""Compiled layers of hybrids: few graphs, whatever the packs, and documents as if alone."""

from __future__ import annotations

import inspect
from copy import deepcopy
from functools import wraps
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from nopad.cli.tiny_model import randomize_weights, tiny_model
from nopad.trainer.layers import compile_layers
from nopad.trainer.layers.delta_rule import RULE
from nopad.trainer.loss import attach_loss
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_5 import modeling_qwen3_5

SLOWLY = pytest.mark.slow
DOCUMENTS = [[5, 6, 7, 8, 9], [11, 12], [13, 14, 15, 16, 17, 18, 19], [4, 9]]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def delta_rule_of_documents(monkeypatch):
    """A function that reads the boundaries, as flash-linear-attention's does on a GPU."""
    stock = getattr(modeling_qwen3_5, RULE)

    @wraps(inspect.unwrap(stock))
    def rule(*inputs: Any, cu_seqlens: Any = None, **options: Any) -> Any:
        if cu_seqlens is None:
            return stock(*inputs, **options)
        sequences = {name: options.pop(name) for name in ("g", "beta")}
        ends = cu_seqlens.tolist()
        documents = [
            stock(
                *(x[:, start:end] for x in inputs),
                **{name: x[:, start:end] for name, x in sequences.items()},
                **options,
            )[0]
            for start, end in pairwise(ends)
        ]
        return torch.cat(documents, 1), None

    monkeypatch.setattr(modeling_qwen3_5, RULE, torch.compiler.disable(rule))


def hybrid(kind: str) -> Any:
    torch.manual_seed(0)
    model, _ = tiny_model(CONFIG_MAPPING[kind](), every_kind=True, attn_implementation="nopad")
    randomize_weights(model)
    return model.train()


def pack(documents: list[list[int]]) -> dict[str, Any]:
    bounds = torch.tensor([0, *map(len, documents)], dtype=torch.int32).cumsum(0).int()
    longest = max(map(len, documents))
    return {
        "input_ids": torch.tensor([[*chain(*documents)]]),
        "position_ids": torch.cat([torch.arange(len(ids)) for ids in documents])[None],
        "labels": torch.tensor([[*chain(*([-100, *ids[1:]] for ids in documents))]]),
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds),
        **dict.fromkeys(("max_length_q", "max_length_k"), longest),
        "use_cache": False,
    }


def compiled_like_one_by_one(kind: str, again: bool = False) -> CompileCounterWithBackend:
    """Train a step with compiled layers and compare it; return the counter of graphs.

    again: attach the loss once more, as a second trainer does.
    """
    model = hybrid(kind)
    alone = deepcopy(model)
    alone.set_attn_implementation("eager")
    counter = CompileCounterWithBackend(aot_eager)
    attach_loss(model)
    compile_layers(model, backend=counter)
    if again:
        attach_loss(model)
    model(**pack(DOCUMENTS)).loss.backward()
    labels = sum(len(ids) - 1 for ids in DOCUMENTS)
    for ids in map(torch.tensor, DOCUMENTS):
        loss = alone(input_ids=ids[None], labels=ids[None], use_cache=False).loss
        (loss * (len(ids) - 1) / labels).backward()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:
            distance = (ours.grad - theirs.grad).norm()
            assert distance <= 1e-4 * theirs.grad.norm() + 1e-7, name
    counts = []
    for documents in ([[3] * 40, [4] * 30], [[5] * 21, [4] * 20, [7] * 3], [[6] * 9]):
        model(**pack(documents)).loss.backward()
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, "packs are compiled again and again"
    return counter


def test_a_delta_rule_is_an_operator_of_its_layer(delta_rule_of_documents):
    assert compiled_like_one_by_one("qwen3_5_text").frame_count == 2  # with attention, without


def test_convolutions_are_part_of_their_layer():
    assert compiled_like_one_by_one("lfm2").frame_count == 2


@pytest.mark.parametrize(
    "kind",
    ["bamba", *(pytest.param(kind, marks=SLOWLY) for kind in
                ("falcon_h1", "jamba", "mamba2", "nemotron_h", "olmo_hybrid", "zamba2"))],
)  # fmt: skip
def test_modules_that_run_document_by_document_are_outside_of_graphs(kind):
    compiled_like_one_by_one(kind)


@pytest.mark.parametrize("kind", ["lfm2", "bamba"])
def test_another_trainer_of_a_compiled_hybrid_resets_states_too(kind):
    compiled_like_one_by_one(kind, again=True)


def test_a_compiled_hybrid_gets_its_classes_back():
    model = hybrid("bamba")
    before = [type(module) for module in model.modules()]
    loss = attach_loss(model)
    compiled = compile_layers(model, backend="eager")
    loss.detach()
    compiled.undo()
    assert [type(module) for module in model.modules()] == before


def test_a_delta_rule_under_autocast_and_checkpointing_rounds_as_without_a_graph(
    delta_rule_of_documents,
):
    gradients = []
    for compiles in (False, True):
        model = hybrid("qwen3_5_text")
        model.gradient_checkpointing_enable()
        attach_loss(model)
        if compiles:
            compile_layers(model, backend=aot_eager)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**pack(DOCUMENTS)).loss
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 0.03 * gradients[0].norm()


def test_a_delta_rule_that_continues_a_state_is_no_operator(delta_rule_of_documents):
    model = hybrid("qwen3_5_text")
    attach_loss(model)
    compile_layers(model)
    inputs = torch.randn(5, 1, 4, 2, 8).unbind(), torch.randn(2, 1, 4, 2).unbind()
    (q, k, v, *_), (g, beta) = inputs
    state = torch.randn(1, 2, 8, 8)

    def continued(rule: Any) -> Any:
        return rule(q, k, v, g=-g.abs(), beta=beta, initial_state=state, output_final_state=True)

    expected = continued(getattr(modeling_qwen3_5, RULE))
    compiled = torch.compile(lambda: continued(getattr(modeling_qwen3_5, RULE)), backend="eager")
    for ours, theirs in zip(compiled(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
