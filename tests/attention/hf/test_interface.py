"""The attention function inside Transformers: what reaches it, what it refuses, how it trains."""

import copy
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from nopad.attention import (
    PagedCache,
    Pages,
    Varlen,
    attend,
    check_every_layer,
    forward_context,
    layer_shapes,
    unsupported_reason,
)
from nopad.attention.backends import selection
from nopad.attention.hf import check_packed, check_paged, interface, packed_batch, random_documents
from nopad.attention.hf.selfcheck import nan_max
from nopad.cli.tiny_model import randomize_weights, tiny_config
from nopad.runtime import destroy_group
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def tiny(kind="llama", attention="nopad", **changes):
    config = tiny_config(CONFIG_MAPPING[kind](), **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    randomize_weights(model)
    return model.eval()


def with_attention(model, name):
    other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=name)
    other.load_state_dict(model.state_dict())
    return other.eval()


def gradients(model, batch):
    model.zero_grad()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def largest(a, b):
    return nan_max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def test_gradient_checkpointing_gives_the_same_gradients():
    model = tiny().train()
    batch = packed_batch(random_documents(model))
    plain = gradients(model, batch)
    model.gradient_checkpointing_enable()
    assert largest(plain, gradients(model, batch)) == 0


def test_selective_checkpoints_keep_nothing_of_the_trial_of_a_backend():
    kept = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    model = tiny().train()
    batch = packed_batch(random_documents(model))
    plain = gradients(model, batch)
    contexts = partial(create_selective_checkpoint_contexts, kept)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    selection._cached_choice.cache_clear()
    assert largest(plain, gradients(model, batch)) == 0


def test_checkpointed_layers_find_boundaries_without_keywords():
    model = tiny("nemotron").train()
    oracle = with_attention(model, "eager")
    model.gradient_checkpointing_enable()
    assert check_packed(model, oracle).within()


def test_an_evaluation_through_pages_leaves_training_as_it_was():
    model = tiny().train()
    batch = packed_batch(random_documents(model))
    plain, state = gradients(model, batch), torch.get_rng_state()
    check_paged(model)
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert largest(plain, gradients(model, batch)) == 0


def test_rows_of_a_batch_are_sequences_when_nothing_else_is_said():
    model = tiny()
    rows = torch.cat(random_documents(model, (7, 7, 7)))
    together = model(input_ids=rows, use_cache=False).logits
    alone = torch.cat([model(input_ids=row[None], use_cache=False).logits for row in rows])
    assert (together - alone).abs().max() < 1e-4


def test_several_packed_rows_take_flat_boundaries():
    model = tiny()
    first, second = (packed_batch(random_documents(model, (5, 3), seed)) for seed in (0, 1))
    batch = {k: torch.cat([first[k], second[k]]) for k in ("input_ids", "position_ids")}
    flat = torch.tensor([0, 5, 8, 13, 16], dtype=torch.int32)
    got = model(**batch, cu_seq_lens_q=flat, cu_seq_lens_k=flat, max_length_q=5, use_cache=False)
    want = torch.cat([model(**b).logits for b in (first, second)])
    assert (got.logits - want).abs().max() < 1e-4


def test_restarting_positions_alone_keep_documents_apart():
    model = tiny()
    batch = packed_batch(random_documents(model))
    want = model(**batch).logits
    only = {k: batch[k] for k in ("input_ids", "position_ids", "use_cache")}
    assert (model(**only).logits - want).abs().max() < 1e-4


def test_boundaries_of_the_keys_alone_are_those_of_the_queries():
    model = tiny()
    batch = packed_batch(random_documents(model))
    want = model(**batch).logits
    only = {k: batch[k] for k in ("input_ids", "cu_seq_lens_k", "max_length_k", "use_cache")}
    assert (model(**only).logits - want).abs().max() < 1e-4


def test_autocast_narrows_attention_as_it_narrows_every_product():
    model = tiny()
    batch = packed_batch(random_documents(model))
    seen = []
    original = interface.attend
    interface.attend = lambda q, *rest, **rule: seen.append(q.dtype) or original(q, *rest, **rule)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            narrow = model(**batch).logits
    finally:
        interface.attend = original
    assert set(seen) == {torch.bfloat16}
    wide = model(**batch).logits
    assert (narrow.float() - wide).abs().mean() < 0.05 * wide.abs().mean()


@pytest.mark.smoke("refusals")
@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"attention_mask": torch.tensor([[0] * 3 + [1] * 5])}, "takes no attention_mask"),
        ({"attention_mask": torch.ones(1, 1, 8, 8).tril()}, "takes no attention_mask"),
    ],
    ids=["a padding mask", "a written-out mask"],
)
def test_masks_are_refused(named, message):
    model = tiny()
    with pytest.raises(ValueError, match=message):
        model(input_ids=torch.arange(8)[None], use_cache=False, **named)


def test_a_mask_of_ones_says_nothing_and_passes():
    model = tiny()
    ids = torch.arange(3, 11)[None]
    masked = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    assert torch.equal(masked, model(input_ids=ids, use_cache=False).logits)


def test_a_compiled_model_looks_at_its_mask_too():
    model, ids = tiny(layers=1), torch.arange(3, 11)[None]
    padded = torch.tensor([[0] * 3 + [1] * 5])
    fullgraph = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="takes no attention_mask"):
        fullgraph(input_ids=ids, attention_mask=padded, use_cache=False)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="takes no attention_mask"):
        compiled(input_ids=ids, attention_mask=padded, use_cache=False)


@pytest.mark.parametrize(("compiled", "entries"), [(False, 0), (False, 1), (True, 1)])
def test_boundaries_that_were_cut_off_are_refused_by_their_shape_alone(compiled, entries):
    """As Accelerate's `prepare` hands them on, which slices every tensor of a batch like a row."""
    torch.compiler.reset()
    model = tiny(layers=1)
    batch = packed_batch(random_documents(model))
    run = torch.compile(model, backend="eager") if compiled else model
    cut = batch["cu_seq_lens_q"][:entries]
    with pytest.raises(
        ValueError, match=f"cut to {entries} of its entries.*PackedAccelerateLoader"
    ):
        run(**{**batch, "cu_seq_lens_q": cut, "cu_seq_lens_k": cut})
    assert run(**batch).logits.isfinite().all()
    torch.compiler.reset()  # what raised is never compiled again


def test_boundaries_cut_to_an_entry_a_row_are_refused():
    ids, cu = torch.arange(8).view(2, 4), torch.tensor([0, 2, 4, 8], dtype=torch.int32)
    model = tiny(layers=1)
    given = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])}
    assert model(**given, cu_seq_lens_q=cu, max_length_q=4, use_cache=False).logits.isfinite().all()
    with pytest.raises(ValueError, match="cut to 2 of its entries"):
        model(**given, cu_seq_lens_q=cu[:2], max_length_q=4, use_cache=False)


def test_keys_of_a_foreign_cache_are_refused():
    model = tiny()
    past = model(input_ids=torch.arange(3, 8)[None], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=torch.tensor([[9]]), past_key_values=past, use_cache=True)


def test_attention_dropout_is_refused_in_training():
    model = tiny()
    model.config.attention_dropout = 0.1
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout 0\.1 is not supported"):
        model.train()(input_ids=torch.arange(8)[None], use_cache=False)


def test_chunked_attention_is_refused_beyond_one_chunk():
    model = tiny("llama4_text")
    assert check_packed(model, with_attention(model, "eager")).within()
    model.config.attention_chunk_size = 8
    with pytest.raises(ValueError, match="chunks of 8"):
        model(**packed_batch(random_documents(model)))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen3_next", "linear"),
        ("bloom", "interface"),
        ("deepseek_v32", "index"),
        ("bart", "position_ids"),
    ],
)
def test_models_that_cannot_be_served_are_refused_with_the_reason(kind, reason):
    assert reason in (unsupported_reason(tiny(kind, "eager")) or "")


def test_shapes_of_the_cache_are_probed_without_a_trace():
    model = tiny("deepseek_v3", attention="eager").train()
    state = torch.get_rng_state()
    assert layer_shapes(model) == [(4, 24, 16)] * 2
    assert model.training and model.config._attn_implementation == "eager"
    assert torch.equal(state, torch.get_rng_state())


def test_the_proof_fails_where_one_layer_is_not_told():
    model = tiny("nemotron")
    batch = packed_batch(random_documents(model))
    varlen = Varlen(batch["cu_seq_lens_q"], batch["max_length_q"])
    with check_every_layer(model), forward_context(varlen):
        model(**batch)
    with pytest.raises(ValueError, match="did not receive"), check_every_layer(model):
        model(**batch)  # nemotron drops the keywords, and there is no context


def test_the_proof_fails_on_a_layer_that_does_not_call_the_function():
    model = tiny()
    with pytest.raises(ValueError, match="never called"), check_every_layer(model):
        with_attention(model, "eager")(input_ids=torch.arange(8)[None], use_cache=False)


@pytest.mark.slow  # test_compile_layers.py compiles a whole step, with the attached loss
def test_fixed_shapes_compile_to_one_graph_without_breaks():
    model, batches = tiny(layers=1), []
    for lengths in ((9, 1, 14, 6), (20, 4, 3, 3)):
        batch = packed_batch(random_documents(model, lengths))
        padded = torch.cat([batch["cu_seq_lens_q"], torch.full((3,), 30, dtype=torch.int32)])
        batches.append({**batch, "cu_seq_lens_q": padded, "cu_seq_lens_k": padded})
        batches[-1] |= {"max_length_q": 30, "max_length_k": 30}
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for batch in batches:
        plain = gradients(model, batch)
        model.zero_grad()
        compiled(**batch, labels=batch["input_ids"]).loss.backward()
        assert largest(plain, [p.grad for p in model.parameters()]) < 1e-5
    assert counter.frame_count == 1


def test_paged_steps_compile_to_one_graph_without_breaks():
    model = tiny(layers=1)
    cache = PagedCache(4, 16, layer_shapes(model), torch.float32, "cpu")
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for place in range(3):
        lengths = torch.tensor([place + 1, place + 1], dtype=torch.int32)
        slots = torch.tensor([place, 16 + place])
        table = torch.tensor([[0], [1]], dtype=torch.int32)
        varlen = Varlen(
            torch.arange(3, dtype=torch.int32), 1, Pages(cache, table, lengths, slots, 16)
        )
        step = {"input_ids": torch.tensor([[5, 6]]), "position_ids": torch.full((1, 2), place)}
        with torch.no_grad():
            plain = model(**step, use_cache=False, varlen=varlen).logits
            assert (
                compiled(**step, use_cache=False, varlen=varlen).logits - plain
            ).abs().max() < 1e-5
    assert counter.frame_count == 1


@pytest.fixture
def one_rank(tmp_path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    destroy_group()


def test_ddp_and_fsdp2_give_the_same_gradients(one_rank):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = tiny()
    batch = packed_batch(random_documents(model))
    plain = gradients(model, batch)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    assert largest(plain, gradients(wrapped, batch)) < 1e-6
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    sharded = copy.deepcopy(model)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    got = [g.full_tensor() for g in gradients(sharded, batch)]
    assert largest(plain, got) < 1e-6


@pytest.mark.smoke("packed ≡ one by one")
def test_only_one_sequence_moves_when_it_is_changed():
    """The seeded fault for all of the above: forget one boundary, and a neighbour moves."""
    model = tiny()
    batch = packed_batch(random_documents(model))
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, :9] = batch["input_ids"][0, :9].flip(0)
    isolated = [model(**b).logits[:, 9:] for b in (batch, other)]
    assert torch.equal(*isolated)
    joined = batch["cu_seq_lens_q"][[0, 2, 3, 4, 5]]
    blind = [model(**{**b, "cu_seq_lens_q": joined}).logits[:, 9:] for b in (batch, other)]
    assert not torch.equal(*blind)


def test_attend_needs_no_transformers_model():
    q, k, v = (torch.randn(5, 2, 16) for _ in range(3))
    out = attend(q, k, v, Varlen(torch.tensor([0, 2, 5], dtype=torch.int32), 3))
    assert torch.allclose(out[0], v[0], atol=1e-6) and torch.allclose(out[2], v[2], atol=1e-6)


def test_packs_in_a_sequence_classifier_are_refused():
    model = AutoModelForSequenceClassification.from_config(
        tiny().config, attn_implementation="nopad"
    )
    pack = packed_batch([torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9]])])
    restarts = {"position_ids": pack["position_ids"]}
    for arguments in (pack, {"input_ids": pack["input_ids"], **restarts}):
        with pytest.raises(ValueError, match="one row of logits for all documents"):
            model(**arguments)
    model.config.pad_token_id = 0
    rows = torch.tensor([[5, 6, 7], [8, 9, 4]])
    assert model(input_ids=rows, use_cache=False).logits.shape == (2, 2)
