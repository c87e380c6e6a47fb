"""Fixed shapes compile once: as many graphs as there must be, however the packs change."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from nopad.collators import PackedCollator
from nopad.trainer.compiling import compile_layers
from nopad.trainer.loss import attach_loss
from nopad.trainer.stacking import stack_products
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.compilers import nop


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batches(**settings) -> list[dict]:
    collator = PackedCollator(**settings)
    packs = tiny_run.packs(tiny_run.dataset(), 6)
    assert len({len(pack.lengths) for pack in packs}) > 1
    return [collator(pack) for pack in packs]


def test_fixed_shapes_compile_the_whole_step_into_one_graph():
    counter = CompileCounterWithBackend("eager")
    model = tiny_run.model()
    attach_loss(model)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for batch in batches(fixed_sequences=16):
        compiled(**batch).loss.backward()
    assert counter.frame_count == 1


def test_all_layers_share_one_graph():
    counter = CompileCounterWithBackend("eager")
    model = tiny_run.model()
    assert compile_layers(model, backend=counter) == 2
    for batch in batches(fixed_sequences=16):
        model(**batch).loss.backward()
    assert counter.frame_count == 1


def test_natural_boundaries_compile_a_bounded_number_of_times():
    counter = CompileCounterWithBackend("eager")
    model = tiny_run.model()
    compile_layers(model, backend=counter)
    for batch in batches(fill=True):
        model(**batch).loss.backward()
    assert counter.frame_count <= 4


def test_compiled_layers_give_the_gradient_of_samples_one_by_one():
    model = tiny_run.model()
    gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 1))
    attach_loss(model)
    compile_layers(model, backend="aot_eager")
    model(**batches(fixed_sequences=16)[0]).loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert tiny_run.distance(ours, gold) < 2e-6


def products(graph) -> int:
    return sum(node.target is torch._C._nn.linear for node in graph.graph.nodes)


def test_narrow_products_are_stacked_and_compute_the_same():
    seen = []

    def backend(graph, inputs):
        before = products(graph)
        stack_products(graph)
        seen.append((before, products(graph)))
        return aot_autograd(fw_compiler=nop)(graph, inputs)

    model = tiny_run.model()
    gold = tiny_run.gold_gradient(model, tiny_run.packs(tiny_run.dataset(), 1))
    attach_loss(model)
    compile_layers(model, backend=backend)
    model(**batches(fixed_sequences=16)[0]).loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert tiny_run.distance(ours, gold) < 2e-6
    assert seen == [(7, 5)]  # queries, keys and values
