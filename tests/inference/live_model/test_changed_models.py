"""The model changes between calls: the engine uses the current weights, and leaves them alone."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nopad.inference import Engine, SamplingParams
from nopad.inference.execution import cuda_graphs
from nopad.inference.executor import build_key
from nopad.inference.live_model.cast_weights import CastWeights
from torch import nn

PROMPT = list(range(5, 45))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def model(tiny):
    return copy.deepcopy(tiny("llama"))


def score(engine) -> float:
    return engine.score([PROMPT], [[6, 7, 8]])[0].logprob


def plain(model) -> float:
    """The same score from a forward of the model itself."""
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, 6, 7, 8]])).logits[0].float().log_softmax(-1)
    return sum(float(logits[len(PROMPT) - 1 + i, t]) for i, t in enumerate([6, 7, 8]))


def parameter_ids(model) -> list[tuple[str, int]]:
    """Return (name, id) of every parameter, tied ones twice."""
    named = model.named_parameters(remove_duplicate=False)
    return [(name, id(parameter)) for name, parameter in named]


def finish(engine) -> list[int]:
    """Step until a completion arrives."""
    for _ in range(100):
        for event in engine.step():
            if event.completion is not None:
                return event.completion.token_ids
    raise AssertionError("no completion arrived")


def load(model):
    other = {name: -1.1 * tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(other, assign=True)


def replace(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0).clone())


def tie(model):
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def share(model):
    first, second = model.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight


def resize(model):
    model.resize_token_embeddings(130, mean_resizing=False)


def halve(model):
    with torch.no_grad():
        model.lm_head.weight.neg_()
    model.half()


CHANGES = [load, replace, tie, share, resize, halve]


@pytest.mark.parametrize("how", ["asked for", "autocast"])
@pytest.mark.parametrize("change", CHANGES)
def test_narrow_copies_follow_the_parameters_and_give_them_back(model, change, how):
    engine = Engine(model, dtype=torch.bfloat16 if how == "asked for" else None)
    around = nullcontext() if how == "asked for" else torch.autocast("cpu", torch.bfloat16)
    with around:
        before = score(engine)
        change(model)
        before_call = parameter_ids(model)
        after = score(engine)
        assert parameter_ids(model) == before_call
        assert after == score(Engine(model, dtype=torch.bfloat16)) != before
    assert parameter_ids(model) == before_call


def test_a_call_that_fails_gives_the_new_parameters_back_too(model):
    engine = Engine(model, dtype=torch.bfloat16)
    score(engine)
    load(model)
    there = parameter_ids(model)
    engine._executor.runner.launch = lambda step: (_ for _ in ()).throw(RuntimeError("seeded"))
    with pytest.raises(RuntimeError, match="seeded"):
        score(engine)
    assert parameter_ids(model) == there


def test_weights_tied_no_more_have_copies_of_their_own():
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    b.weight = a.weight
    cast = CastWeights([a, b], torch.bfloat16)
    assert cast.bytes == 18 and not cast.refresh([a, b])
    b.weight = nn.Parameter(torch.full((3, 3), 5.0))
    assert cast.refresh([a, b]) and cast.bytes == 36
    with cast.active():
        assert not torch.equal(a.weight, b.weight) and b.weight.dtype == torch.bfloat16
    assert a.weight.dtype == b.weight.dtype == torch.float32


def test_what_someone_else_put_in_meanwhile_stays():
    a = nn.Linear(3, 3, bias=False)
    theirs = nn.Parameter(torch.ones(3, 3))
    with CastWeights([a], torch.bfloat16).active():
        a.weight = theirs
    assert a.weight is theirs


@pytest.mark.parametrize("first, then", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_the_cache_takes_the_dtype_of_the_model(model, first, then):
    model.to(getattr(torch, first))
    engine = Engine(model)
    score(engine)
    model.to(getattr(torch, then))
    assert score(engine) == score(Engine(model)) == pytest.approx(plain(model), abs=5e-2)
    if then == "float32":
        assert score(engine) == pytest.approx(plain(model), abs=1e-4)
    assert engine._executor.runner.cache.layer(0)[0].dtype == getattr(torch, then)


def test_another_device_or_other_modules_are_another_kind_of_model():
    here, there = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    assert build_key([here], None) == build_key([here], None)
    assert build_key([here], None) != build_key([there], None)
    assert build_key([here], None) != build_key([here, nn.Identity()], None)
    assert build_key([here], None) != build_key([here], torch.bfloat16)


def test_a_change_of_dtype_is_refused_while_requests_run_and_they_live_on(model):
    exact = copy.deepcopy(model.state_dict())
    want = Engine(model).generate([PROMPT], GREEDY)[0].token_ids
    engine = Engine(model)
    engine.add_request(PROMPT, GREEDY)
    engine.step()
    model.bfloat16()
    for call in (
        engine.step,
        lambda: engine.generate([PROMPT]),
        lambda: engine.add_request(PROMPT),
    ):
        with pytest.raises(ValueError, match=r"requests run in torch.float32 .* abort them"):
            call()
    model.float().load_state_dict(exact)
    assert finish(engine) == want
    number = engine.add_request(PROMPT, GREEDY)
    model.bfloat16()
    with pytest.raises(ValueError, match="abort them"):
        engine.step()
    engine.abort(number)
    assert engine.step()[0].completion.finish_reason == "abort"
    assert score(engine) == score(Engine(model))


def test_a_change_of_modules_is_refused_while_requests_run(model):
    engine, want = Engine(model), Engine(model).generate([PROMPT], GREEDY)[0].token_ids
    engine.add_request(PROMPT, GREEDY)
    engine.step()
    mlp = model.model.layers[0].mlp
    before, mlp.down_proj = mlp.down_proj, copy.deepcopy(mlp.down_proj)
    for call in (lambda: engine.generate([PROMPT]), lambda: engine.add_request(PROMPT)):
        with pytest.raises(ValueError, match="the model is now in"):
            call()
    mlp.down_proj = before
    assert finish(engine) == want


@pytest.mark.parametrize("layers", [False, True])
def test_a_sharded_model_is_of_one_kind_gathered_or_not(model, tmp_path, layers):
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        how = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": policy}
        for layer in model.model.layers if layers else ():
            fully_shard(layer, reshard_after_forward=False, **how)
        fully_shard(model, **how)
        engine = Engine(model)
        streamed = [t for event in engine.stream([PROMPT], GREEDY) for t in event.token_ids]
        prepared, machine = engine.stats.setup_seconds, engine._executor
        for _ in range(2):
            model(torch.tensor([PROMPT])).logits.float().sum().backward()
            model.zero_grad()
            assert engine.generate([PROMPT], GREEDY)[0].token_ids == streamed
        assert engine._executor is machine and engine.stats.setup_seconds == prepared
    finally:
        dist.destroy_process_group()


def test_requests_under_autocast_finish_under_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        want = Engine(model).generate([PROMPT], GREEDY)[0].token_ids
        engine = Engine(model)
        engine.add_request(PROMPT, GREEDY)
        engine.step()
    with pytest.raises(ValueError, match=r"requests run in torch.bfloat16 .* now in torch.float32"):
        engine.step()
    with torch.autocast("cpu", torch.bfloat16):
        assert finish(engine) == want


def test_a_forward_that_fails_while_it_is_looked_at_harms_no_request(model):
    want = Engine(model).generate([PROMPT], GREEDY)[0].token_ids
    engine = Engine(model)
    engine.add_request(PROMPT, GREEDY)
    engine.step()
    model.forward = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("seeded"))
    with pytest.raises(RuntimeError, match="seeded"):
        engine.step()
    del model.forward
    assert finish(engine) == want


def test_new_rows_of_the_embeddings_are_in_the_vocabulary(model):
    engine = Engine(model)
    assert "not in the vocabulary of 97" in engine.generate([[110]], GREEDY)[0].error
    resize(model)
    wanted = SamplingParams(temperature=0, max_tokens=3, logit_bias={120: 1000.0})
    assert engine.generate([[110, 5]], wanted)[0].token_ids == [120] * 3
    assert "not in the vocabulary of 130" in engine.generate([[130]], GREEDY)[0].error


@pytest.mark.parametrize("inside", [[True, False], [False, True, False]])
def test_calls_inside_and_outside_inference_mode_alternate(model, inside):
    engine = Engine(model, dtype=torch.bfloat16)
    outputs = []
    for mode in inside:
        with torch.inference_mode(mode):
            outputs.append(engine.generate([PROMPT, [6, 7]], GREEDY)[1].token_ids)
            assert torch.is_inference_mode_enabled() == mode
        with torch.no_grad():
            model.lm_head.weight.add_(0)  # the low-precision copies are refreshed
    assert outputs == [outputs[0]] * len(inside)


@pytest.mark.parametrize("how", ["cancel", "close", "run out", "queue"])
def test_an_engine_that_keeps_nothing_gives_all_back_at_the_end(model, how):
    engine = Engine(model, keep_memory=False, max_waiting=1, max_num_seqs=1)
    other = engine.add_request([5, 6], GREEDY) if how == "cancel" else None
    if how == "cancel":
        engine.step()
        engine.abort(other)
    elif how == "close":
        stream = engine.stream([PROMPT, [6, 7]], GREEDY)
        next(stream)
        assert engine._executor is not None
        stream.close()
    else:
        prompts = [PROMPT] if how == "run out" else [PROMPT, [6, 7], [8]]
        events = list(engine.stream(prompts, GREEDY))
        done = [event.request_id for event in events if event.completion is not None]
        assert sorted(done) == list(range(len(prompts)))
    assert engine._executor is None
    assert len(engine.generate([PROMPT], GREEDY)[0].token_ids) == 12


@pytest.fixture
def adapted(model):
    """A model with two LoRA adapters."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    lora = peft.get_peft_model(model, settings)
    lora.add_adapter("other", settings)
    return lora.eval()


def weaken(lora) -> None:
    for module in lora.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 0.1


SWITCHES = {
    "off": lambda lora: lora.base_model.disable_adapter_layers(),
    "other": lambda lora: lora.set_adapter("other"),
    "scaled": weaken,
    "merged": lambda lora: lora.merge_adapter(),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_switched_adapters_count_as_new_weights(adapted, switch):
    engine = Engine(adapted)
    assert score(engine) == pytest.approx(plain(adapted), abs=1e-4)
    before = plain(adapted)
    switch(adapted)
    assert score(engine) == pytest.approx(plain(adapted), abs=1e-4)
    assert switch is SWITCHES["merged"] or plain(adapted) != pytest.approx(before, abs=1e-2)


def test_adapters_off_for_a_reference_and_on_again(adapted):
    engine = Engine(adapted)
    policy = score(engine)
    with adapted.disable_adapter():
        reference = score(engine)
        assert reference == pytest.approx(plain(adapted), abs=1e-4) != policy
    assert score(engine) == policy


def test_running_requests_go_on_with_the_adapters_that_are_on(adapted):
    engine = Engine(adapted)
    engine.add_request(PROMPT, GREEDY)
    made = [token for _ in range(4) for event in engine.step() for token in event.token_ids]
    adapted.base_model.disable_adapter_layers()
    done = finish(engine)
    assert made and made != done
    rest = SamplingParams(temperature=0, max_tokens=12 - len(made), ignore_eos=True)
    assert done == made + Engine(adapted).generate([PROMPT + made], rest)[0].token_ids


def test_graphs_captured_with_other_adapters_are_not_replayed(adapted, monkeypatch):
    class Graphs(list):
        def can_run(self, step):
            return step is decode

        def run(self, step, forward):
            return self

    monkeypatch.setattr(cuda_graphs, "StepGraphs", lambda *_: Graphs())
    engine = Engine(adapted)
    score(engine)
    runner = engine._executor.runner
    runner.replays._graphs = Graphs()
    decode: Any = SimpleNamespace(
        requests=[0], sampled_requests=[0], logits_indices=[0], max_query_len=1
    )
    first = runner.replays.replay(decode, runner.forward)
    with adapted.disable_adapter():
        score(engine)  # no decode step
    score(engine)
    assert runner.replays.replay(decode, runner.forward) is first
    with adapted.disable_adapter():
        score(engine)
        second = runner.replays.replay(decode, runner.forward)
    score(engine)
    third = runner.replays.replay(decode, runner.forward)
    assert len({id(graphs) for graphs in (first, second, third)}) == 3
    assert runner.replays.replay(decode, runner.forward) is third


def test_adapters_that_come_after_the_first_call_are_noticed(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    engine = Engine(model)
    without = score(engine)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    lora = peft.get_peft_model(model, settings).eval()
    assert score(engine) == pytest.approx(plain(lora), abs=1e-4) != without
    lora.merge_and_unload()
    assert score(engine) == pytest.approx(plain(model), abs=1e-4)


def test_a_model_without_adapters_has_none_to_look_at(model):
    engine = Engine(model)
    score(engine)
    assert engine._session._weights._adapter_layers == []
