"""Compiled layers: as many graphs as there must be, and the gradients of stock layers."""

from __future__ import annotations

from copy import deepcopy

import pytest
import tiny_run
import torch
from nopad.collators import PackedCollator
from nopad.inference import batch_invariant
from nopad.trainer.layers import compile_layers
from nopad.trainer.loss import attach_loss
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


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


@torch._dynamo.config.patch(recompile_limit=2)  # 8 by default
def test_models_may_have_more_graphs_than_torch_compile_allows_by_default():
    settings = {"vocab_size": 128, "n_embd": 16, "n_layer": 3, "n_head": 2}
    config = GPT2Config(**settings, scale_attn_by_inverse_layer_idx=True, attn_pdrop=0.0)
    counter = CompileCounterWithBackend("eager")
    for model in (GPT2LMHeadModel(config), tiny_run.model()):
        model.set_attn_implementation("nopad")
        compile_layers(model.train(), backend=counter)
        model(**batches()[0]).loss.backward()
    assert counter.frame_count > 2


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


def test_a_forward_that_asks_for_hidden_states_gets_them_uncompiled():
    counter = CompileCounterWithBackend("eager")
    model, batch = tiny_run.model(), batches()[0]
    attach_loss(model)
    expected = model(**batch, output_hidden_states=True).hidden_states
    compile_layers(model, backend=counter)
    states = model(**batch, output_hidden_states=True).hidden_states
    assert all(map(torch.equal, states, expected)) and counter.frame_count == 0
    model(**batch)
    assert counter.frame_count == 1


def test_batch_invariant_mode_runs_uncompiled():
    counter = CompileCounterWithBackend("eager")
    model, batch = tiny_run.model(), batches()[0]
    compile_layers(model, backend=counter)
    with batch_invariant(64):
        model(**batch)
    assert counter.frame_count == 0
    with torch.device("cpu"):
        model(**batch)
    assert counter.frame_count == 1


def adapted(model, **options):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config, **options)


@pytest.mark.parametrize("way", ["adapters", "checkpointed", "autocast"])
def test_compiled_layers_have_the_gradients_of_stock_ones(way):
    stock, batch = tiny_run.model(), batches()[0]
    if way == "adapters":
        stock = adapted(stock)
    if way == "checkpointed":
        stock.gradient_checkpointing_enable()
    compiled = deepcopy(stock)
    compile_layers(compiled, backend="aot_eager")
    for model in (stock, compiled):
        attach_loss(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            model(**batch).loss.backward()
    gradients = (
        {n: p.grad for n, p in m.named_parameters() if p.grad is not None}
        for m in (compiled, stock)
    )
    assert tiny_run.distance(*gradients) < (2e-2 if way == "autocast" else 2e-6)


def test_adapters_are_switched_off_and_on_in_compiled_layers():
    model, batch = adapted(tiny_run.model()), batches()[0]
    compile_layers(model, backend="eager")
    adapters = model(**batch).loss
    with model.disable_adapter():
        assert not torch.equal(model(**batch).loss, adapters)
    assert torch.equal(model(**batch).loss, adapters)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["bf16 weights", "autocast", "adapters", "checkpointed"])
def test_a_bf16_step_is_as_near_to_fp32_as_with_stock_layers(way):
    tokens = torch.randint(1, 300, (1, 500), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": piece.tolist()} for piece in tokens[0].split([90, 200, 210])]
    batch = {k: v.cuda() if torch.is_tensor(v) else v for k, v in PackedCollator()(rows).items()}

    def gradients(low: bool, attention: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=300, hidden_size=128, intermediate_size=320,
                             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                             attn_implementation=attention)  # fmt: skip
        model = LlamaForCausalLM(config).cuda()
        if way == "adapters":
            model = adapted(model, autocast_adapter_dtype=False)
        if way == "checkpointed":
            model.gradient_checkpointing_enable()
        if low and way in ("bf16 weights", "adapters"):
            model = model.to(torch.bfloat16)
        if attention == "nopad":
            attach_loss(model)
            compile_layers(model)
        autocast = low and way in ("autocast", "checkpointed")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            model.train()(**batch).loss.backward()
        return {n: p.grad.float() for n, p in model.named_parameters() if p.requires_grad}

    gold, low, ours = gradients(False, "sdpa"), gradients(True, "sdpa"), gradients(True, "nopad")
    for name, gradient in ours.items():
        error, allowed = ((g - gold[name]).norm() for g in (gradient, low[name]))
        assert error <= 2 * allowed, name


def test_a_forward_without_boundaries_runs_as_without_compiled_layers():
    model, ids = tiny_run.model().eval(), torch.arange(5, 12)[None]
    model.set_attn_implementation("nopad")
    logits = model(ids, use_cache=False).logits
    compile_layers(model, backend="eager")
    assert torch.equal(model(ids, use_cache=False).logits, logits)


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [lambda model: model, adapted])
def test_normed_and_gated_states_are_not_kept_for_the_backward(prepare):
    model, batch = prepare(tiny_run.model()), batches()[0]
    attach_loss(model)

    def kept(layers_compiled: dict) -> int:
        torch._dynamo.reset()
        compiled, sizes = compile_layers(model, **layers_compiled), {}
        keep = lambda x: sizes.__setitem__(x.untyped_storage().data_ptr(), x.nbytes) or x  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(**batch)
        compiled.undo()
        return sum(sizes.values())

    assert kept({}) < 0.9 * kept({"backend": "inductor"})
