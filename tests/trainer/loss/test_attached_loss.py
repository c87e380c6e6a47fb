"""The attached loss: exact, without logits, and gone without a trace."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from nopad.collators import PackedCollator
from nopad.trainer.loss import attach_loss, cross_entropy, linear_cross_entropy


@pytest.fixture
def chunks_of_four_rows(monkeypatch):
    monkeypatch.setattr("nopad.trainer.loss.cross_entropy.CHUNK_BYTES_CPU", 4 * 37 * 4)


def counting(share: float, rows: int = 11) -> torch.Tensor:
    """Targets of which this share counts: picked out of 37, or -100."""
    targets = torch.randint(0, 37, (rows,))
    idle = torch.randperm(rows)[: rows - round(share * rows)]
    return targets.index_fill(0, idle, -100)


def stock_loss(hidden, weight, shift, targets, weights, smoothing, z_loss):
    """The same by PyTorch, from all logits: the weighted sum, and each loss."""
    logits = torch.nn.functional.linear(hidden, weight, shift)
    losses = torch.nn.functional.cross_entropy(
        logits, targets, reduction="none", label_smoothing=smoothing
    )
    losses = losses + z_loss * torch.logsumexp(logits, -1).square() * (targets != -100)
    return (losses * weights).sum(), losses


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.1, 0.01)]
)
def test_chunks_of_the_rows_that_count_give_the_loss_and_gradients_of_the_whole(
    chunks_of_four_rows, smoothing, z_loss, bias, share
):
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 8, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(37, dtype=torch.float64, requires_grad=True) if bias else None
    targets, weights = counting(share), torch.rand(11)
    inputs = [x for x in (hidden, weight, shift) if x is not None]
    whole, losses = stock_loss(hidden, weight, shift, targets, weights, smoothing, z_loss)
    gold = torch.autograd.grad(3 * whole, inputs)
    total, each = linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=shift,
        token_weights=weights,
        label_smoothing=smoothing,
        z_loss=z_loss,
    )
    ours = torch.autograd.grad(3 * total, inputs)
    assert torch.allclose(total.double(), whole, atol=1e-5)
    assert torch.allclose(each, losses.float(), atol=1e-5)
    for a, b in zip(ours, gold, strict=True):
        assert torch.allclose(a.double(), b, atol=2e-5)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(chunks_of_four_rows, frozen):
    torch.manual_seed(0)
    inputs = [torch.randn(s, requires_grad=True) for s in ((11, 8), (37, 8), (37,))]
    targets = counting(0.4)

    def loss() -> torch.Tensor:
        hidden, weight, bias = inputs
        return linear_cross_entropy(hidden, weight, targets, bias=bias)[0]

    gold = torch.autograd.grad(loss(), inputs)
    for place in frozen:
        inputs[place].requires_grad_(False)
    loss().backward()
    for place, (tensor, gradient) in enumerate(zip(inputs, gold, strict=True)):
        ours = tensor.grad
        assert ours is None if place in frozen else torch.equal(ours, gradient)


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_as_near_as_that_of_low_logits(
    chunks_of_four_rows, dtype, autocast, share
):
    torch.manual_seed(0)
    hidden, weight, shift = torch.randn(64, 32), torch.randn(37, 32), torch.randn(37)
    targets, divisor = counting(share, 64), 3 * 64

    def gradients(loss, given=torch.float32, cast=False):
        inputs = [x.to(given).requires_grad_() for x in (hidden, weight, shift)]
        with torch.autocast("cpu", dtype, enabled=cast):
            return torch.autograd.grad(loss(*inputs), inputs)

    def stock(hidden, weight, shift):
        logits = torch.nn.functional.linear(hidden, weight, shift).float()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / divisor

    def ours(hidden, weight, shift):
        return linear_cross_entropy(hidden, weight, targets, bias=shift, divisor=divisor)[0]

    low = (torch.float32 if autocast else dtype, autocast)
    gold = gradients(stock)
    for a, b, c in zip(gradients(ours, *low), gradients(stock, *low), gold, strict=True):
        assert a.dtype == b.dtype and (a - c).norm() <= 2 * (b - c).norm()


def test_rows_without_a_label_are_not_computed(monkeypatch):
    seen = []

    def kernel(logits, targets, *rest):
        seen.append(len(targets))
        return cross_entropy._losses_and_gradient(logits, targets, *rest)

    monkeypatch.setattr(cross_entropy, "_kernel", lambda device: kernel)
    hidden, weight = torch.randn(100, 8), torch.randn(37, 8)
    for counted, computed in ((40, 40), (96, 96), (97, 100), (0, 0)):
        for told in (None, counted):
            linear_cross_entropy(hidden, weight, counting(counted / 100, 100), counted=told)
            assert sum(seen) == computed
            seen.clear()


def test_the_op_breaks_no_graph():
    weight = torch.randn(37, 8, requires_grad=True)
    targets = torch.randint(0, 37, (11,))
    hidden = torch.randn(11, 8, requires_grad=True)

    def loss(hidden):
        return linear_cross_entropy(2 * hidden, weight, targets)[0]

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(hidden), hidden)
    (gold,) = torch.autograd.grad(loss(hidden), hidden)
    assert torch.equal(ours, gold)


def batch_of(data, **settings):
    return PackedCollator(**settings)(tiny_run.packs(data, 3))


@pytest.mark.parametrize("mean", ["token", "sample"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_step_equals_its_samples_one_by_one(mean, tied):
    model, data = tiny_run.model(tie_word_embeddings=tied), tiny_run.dataset()
    gold = tiny_run.gold_gradient(model, tiny_run.packs(data, 3), mean)
    loss = attach_loss(model)
    assert loss.fused
    model(**batch_of(tiny_run.dataset(), mean=mean)).loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert tiny_run.distance(ours, gold) < 2e-6


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES, attn_implementation="eager"))


def recurrent_gemma():
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SIZES, lru_width=32))


def gemma4():
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = {**SIZES, "final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 0}
    text |= {"global_head_dim": 8, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    config = Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    return Gemma4ForConditionalGeneration(config)


SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("make", [gemma2, recurrent_gemma, gemma4])
def test_capped_logits_are_kept_and_the_loss_becomes_exact(make):
    torch.manual_seed(0)
    model = make()
    model.lm_head.weight.data.mul_(40)  # to where the cap bends
    ids = torch.randint(1, 61, (1, 20))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    stock = model(**batch).loss
    loss = attach_loss(model)
    assert not loss.fused
    assert torch.allclose(model(**batch).loss, stock)
    assert torch.allclose(model(**batch, num_items_in_batch=7).loss, stock * 19 / 7)


def adapted(model, **settings):
    """The model as PEFT wraps it, with what it gives the head trained a little."""
    peft = pytest.importorskip("peft", reason="adapters come with peft")
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, **settings))
    for p in wrapped.parameters():
        p.data.add_(0.05 * torch.randn_like(p) * p.requires_grad)
    return wrapped


@pytest.mark.parametrize("how", ["modules_to_save", "target_modules"])
def test_peft_may_train_or_adapt_the_head_before_or_after(how):
    settings = {"target_modules": ["q_proj"], how: ["lm_head"]}
    batch, gradients = batch_of(tiny_run.dataset()), []
    for before, after in ((False, False), (True, False), (False, True)):
        model = tiny_run.model()
        if before:
            attach_loss(model)
        wrapped = adapted(model, **settings)
        if after:
            attach_loss(model)
        loss = wrapped(**batch).loss
        loss.backward()
        named = wrapped.named_parameters()
        gradients.append({name: p.grad for name, p in named if p.requires_grad} | {"loss": loss})
    gold, *ours = gradients
    assert any("lm_head" in name for name in gold)
    for theirs in ours:
        assert theirs.keys() == gold.keys() and tiny_run.distance(theirs, gold) < 2e-6


def test_a_copied_head_brings_no_model_along():
    model = tiny_run.model()
    attach_loss(model)
    wrapped = adapted(model, target_modules=["q_proj"], modules_to_save=["lm_head"])
    held = parts_within(wrapped.base_model.model.lm_head.modules_to_save["default"])
    assert held == {"Linear"}


def parts_within(root) -> set[str]:
    """The kinds of modules that an object reaches, however."""
    seen, found, open_ = set(), set(), [root]
    while open_:
        thing = open_.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.nn.Module):
            found.add(type(thing).__name__)
        open_ += [getattr(thing, "__self__", None), *getattr(thing, "__dict__", {}).values()]
        if isinstance(thing, dict):
            open_ += thing.values()
    return found


def test_a_resized_head_is_the_one_that_counts():
    batch = batch_of(tiny_run.dataset())
    model = tiny_run.model()
    loss = attach_loss(model)
    model(**batch)
    torch.manual_seed(0)
    model.resize_token_embeddings(80)
    ours = model(**batch).loss
    assert loss.fused
    loss.detach()
    assert torch.allclose(ours, model(**batch).loss)


def test_a_copy_of_the_model_computes_with_its_own_weights():
    from copy import deepcopy

    model, batch = tiny_run.model(), batch_of(tiny_run.dataset())
    attach_loss(model)
    before = model(**batch).loss
    copied = deepcopy(model)
    for p in copied.parameters():
        p.data.mul_(1.1)
    ours = copied(**batch).loss
    ours.backward()
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model(**batch).loss, before)
    copied.nopad_loss.detach()
    assert torch.allclose(copied(**batch).loss, ours) and not torch.allclose(before, ours)


@pytest.mark.parametrize("keep", [False, True])
def test_who_wants_tuples_gets_them(keep):
    model, batch = tiny_run.model(), batch_of(tiny_run.dataset())
    loss = attach_loss(model)
    if keep:
        loss.keep_logits()
    usual = model(**batch)
    assert ("logits" in usual) is keep
    first, *rest = model(**batch, return_dict=False)
    assert torch.equal(first, usual.loss)
    assert len(rest) == keep and all(torch.equal(x, usual.logits) for x in rest)


@pytest.mark.parametrize("keep", [False, True])
def test_what_a_mixture_adds_to_its_loss_stays(keep):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    model, batch = (
        MixtralForCausalLM(MixtralConfig(**SIZES, **experts)),
        batch_of(tiny_run.dataset()),
    )
    stock = model(**batch).loss
    loss = attach_loss(model)
    if keep:
        loss.keep_logits()
    assert torch.allclose(model(**batch).loss, stock)


def test_accelerate_may_unwrap_a_model_and_leave_the_loss():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import extract_model_from_parallel

    AcceleratorState._reset_state()  # another test's precision
    model, batch = tiny_run.model(), batch_of(tiny_run.dataset())
    attach_loss(model)
    ours = model(**batch).loss
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    assert torch.allclose(prepared(**batch).loss, ours, rtol=0.01)
    bare = extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
    assert torch.equal(bare(**batch).loss, ours)
    AcceleratorState._reset_state()


def test_without_labels_the_model_is_what_it_was():
    model, batch = tiny_run.model(), batch_of(tiny_run.dataset())
    del batch["labels"]
    before = model(**batch).logits
    names = list(model.state_dict())
    loss = attach_loss(model)
    assert torch.equal(model(**batch).logits, before)
    assert list(model.state_dict()) == names
    loss.detach()
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)
    assert torch.equal(model(**batch).logits, before)


def test_token_losses_stand_at_their_labels():
    model, batch = tiny_run.model(), batch_of(tiny_run.dataset())
    loss = attach_loss(model)
    total = model(**batch, num_items_in_batch=1).loss
    assert loss.token_losses.shape == batch["labels"].shape
    assert torch.allclose(loss.token_losses.sum(), total)
    assert not loss.token_losses[batch["labels"] == -100].any()


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_step_that_counts_nothing_has_loss_zero_and_no_gradient(keep, low, items):
    model, batch = tiny_run.model(), batch_of(tiny_run.dataset())
    model = model.half() if low else model
    loss = attach_loss(model)
    if keep:
        loss.keep_logits()
    batch["labels"].fill_(-100)
    total = model(**batch, num_items_in_batch=items).loss
    total.backward()
    assert total == 0
    assert all(not p.grad.any() for p in model.parameters())


def test_a_share_of_an_item_is_a_divisor_like_any_other():
    model, batch = tiny_run.model(), batch_of(tiny_run.dataset())
    attach_loss(model)
    one, half = (model(**batch, num_items_in_batch=torch.tensor(x)).loss for x in (1.0, 0.5))
    assert torch.allclose(half, 2 * one)


def test_a_model_is_pickled_without_its_loss_or_not_at_all(tmp_path):
    model, batch = tiny_run.model(), batch_of(tiny_run.dataset())
    loss = attach_loss(model)
    ours = model(**batch).loss
    with pytest.raises(ValueError, match=r"nopad_loss\.detach\(\) before"):
        torch.save(model, tmp_path / "model.pt")
    loss.detach()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    attach_loss(loaded)
    assert torch.equal(loaded(**batch).loss, ours)


def bart():
    from transformers import BartConfig, BartForCausalLM

    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4}
    return BartForCausalLM(BartConfig(vocab_size=61, decoder_ffn_dim=48, **sizes))


def test_a_model_with_a_loss_of_its_own_puts_ours_first():
    torch.manual_seed(0)
    model, ids = bart().eval(), torch.randint(3, 61, (1, 20))
    attach_loss(model)
    usual = model(input_ids=ids, labels=ids)
    assert next(iter(usual)) == "loss"
    first, logits, *_ = model(input_ids=ids, labels=ids, return_dict=False)
    assert torch.equal(first, usual.loss) and torch.equal(logits, usual.logits)


def test_a_forward_under_two_decorators_is_fused():
    from transformers import XGLMConfig, XGLMForCausalLM

    torch.manual_seed(0)
    sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 4}
    model, ids = XGLMForCausalLM(XGLMConfig(vocab_size=61, **sizes)), torch.randint(3, 61, (1, 20))
    stock = model.eval()(input_ids=ids, labels=ids).loss
    loss = attach_loss(model)
    assert loss.fused
    ours = model(input_ids=ids, labels=ids)
    assert "logits" not in ours and torch.allclose(ours.loss, stock)


def test_a_model_that_shifts_its_logits_itself_keeps_them():
    from transformers import GitConfig, GitForCausalLM

    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    config = GitConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
    model, ids = GitForCausalLM(config).eval(), torch.randint(3, 61, (1, 20))
    logits = model(input_ids=ids).logits[0, :-1]
    loss = attach_loss(model)
    assert not loss.fused
    ours = model(input_ids=ids, labels=ids).loss
    assert torch.allclose(ours, torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
