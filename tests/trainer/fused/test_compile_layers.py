"""Fixed shapes compile once: as many graphs as there must be, however the packs change."""

from __future__ import annotations

from copy import deepcopy

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


def test_one_graph_serves_all_layers_and_packs():
    counter = CompileCounterWithBackend("eager")
    model = tiny_run.model()
    assert compile_layers(model, backend=counter).names == ["LlamaDecoderLayer"]
    for batch in batches():
        model(**batch).loss.backward()
    assert counter.frame_count == 1


def test_an_evaluation_runs_uncompiled_and_compiles_nothing():
    counter = CompileCounterWithBackend("eager")
    model, stock, batch = tiny_run.model(), tiny_run.model(), batches()[0]
    compile_layers(model, backend=counter)
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch).loss, stock.eval()(**batch).loss)
    assert counter.frame_count == 0


def test_a_copy_and_a_saved_model_compile_their_own_weights(tmp_path):
    model, batch = tiny_run.model(), batches()[0]
    compiled = compile_layers(model, backend="eager")
    names = list(model.state_dict())
    copy = deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    for other in (copy, torch.load(tmp_path / "model.pt", weights_only=False)):
        assert not torch.equal(other(**batch).loss, model(**batch).loss)
    compiled.undo()
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    assert list(model.state_dict()) == names


def test_compiled_experts_give_the_gradients_of_stock_ones():
    stock = tiny_run.mixture()
    compiled, counter = deepcopy(stock), CompileCounterWithBackend("aot_eager")
    compile_layers(compiled, backend=counter)
    for batch in batches()[:3]:
        for model in (stock, compiled):
            attach_loss(model)
            model.zero_grad()
            model(**batch).loss.backward()
        gradients = ({n: p.grad for n, p in m.named_parameters()} for m in (compiled, stock))
        assert tiny_run.distance(*gradients) < 2e-6
    assert counter.frame_count == 1


def test_compiled_layers_give_the_gradient_of_samples_one_by_one():
    model = tiny_run.model()
    gold = tiny_run.gold_gradient(model, packs()[:1])
    attach_loss(model)
    compile_layers(model, backend="aot_eager")
    model(**batches()[0]).loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert tiny_run.distance(ours, gold) < 2e-6


def test_a_hook_that_comes_after_the_first_step_changes_compiled_layers():
    eager, compiled = tiny_run.model(), tiny_run.model()
    compile_layers(compiled, backend="eager")
    batch = batches()[0]
    before = compiled(**batch).loss
    for model in (eager, compiled):
        model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, out: out * 30)
    assert torch.allclose(compiled(**batch).loss, eager(**batch).loss)
    assert not torch.allclose(compiled(**batch).loss, before)


def test_asking_compiled_layers_for_hidden_states_raises():
    model, batch = tiny_run.model(), batches()[0]
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
    model, batch = tiny_run.model(), batches()[0]
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
