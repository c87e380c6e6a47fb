"""Fixed shapes compile once: as many graphs as there must be, however the packs change."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from nopad.collators import PackedCollator
from nopad.trainer.fused import compile_layers
from nopad.trainer.loss import attach_loss
from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packs() -> list:
    """Six that differ in how many samples they hold."""
    chosen = tiny_run.packs(tiny_run.dataset(), 12)[-6:]
    assert len({len(pack.lengths) for pack in chosen}) > 1
    return chosen


def batches(**settings) -> list[dict]:
    collator = PackedCollator(**settings)
    return [collator(pack) for pack in packs()]


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
    for batch in batches(pad_to_budget=True):
        model(**batch).loss.backward()
    assert counter.frame_count <= 4


def test_compiled_layers_give_the_gradient_of_samples_one_by_one():
    model = tiny_run.model()
    gold = tiny_run.gold_gradient(model, packs()[:1])
    attach_loss(model)
    compile_layers(model, backend="aot_eager")
    model(**batches(fixed_sequences=16)[0]).loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert tiny_run.distance(ours, gold) < 2e-6


def test_a_hook_that_comes_after_the_first_step_changes_compiled_layers():
    eager, compiled = tiny_run.model(), tiny_run.model()
    compile_layers(compiled, backend="eager")
    batch = batches(fixed_sequences=16)[0]
    before = compiled(**batch).loss
    for model in (eager, compiled):
        model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, out: out * 30)
    assert torch.allclose(compiled(**batch).loss, eager(**batch).loss)
    assert not torch.allclose(compiled(**batch).loss, before)


def test_asking_compiled_layers_for_hidden_states_raises():
    model, batch = tiny_run.model(), batches(fixed_sequences=16)[0]
    attach_loss(model)
    compile_layers(model, backend="eager")
    before = model(**batch).loss
    with pytest.raises(ValueError, match=r"^compiled layers cannot return output_hidden_states"):
        model(**batch, output_hidden_states=True)
    assert torch.equal(model(**batch).loss, before)


def test_a_forward_without_boundaries_runs_as_without_compiled_layers():
    model, ids = tiny_run.model().eval(), torch.arange(5, 12)[None]
    model.set_attn_implementation("nopad")
    logits = model(ids, use_cache=False).logits
    compile_layers(model, backend="eager")
    assert torch.equal(model(ids, use_cache=False).logits, logits)


@pytest.mark.slow
def test_normed_and_gated_states_are_not_kept_for_the_backward():
    model, batch = tiny_run.model(), batches(fixed_sequences=16)[0]
    attach_loss(model)

    def kept(layers_compiled: dict) -> int:
        torch._dynamo.reset()
        compile_layers(model, **layers_compiled)
        sizes = {}
        keep = lambda x: sizes.__setitem__(x.untyped_storage().data_ptr(), x.nbytes) or x  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(**batch)
        return sum(sizes.values())

    assert kept({}) < 0.9 * kept({"backend": "inductor"})
