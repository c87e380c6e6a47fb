"""Which backend serves which call, and that a refusal names its reason."""

import logging

import pytest
import torch
import torch._dynamo.testing
from nopad.attention import PagedCache, Pages, Varlen, attend
from nopad.attention.attend import call_spec
from nopad.attention.backends import CallSpec, ScoreParams, sdpa, selection

VARLEN = Varlen(torch.tensor([0, 3], dtype=torch.int32), 3)


def spec(**changes):
    defaults = {
        "device": "cpu", "dtype": torch.float32, "heads": 2, "kv_heads": 2, "key_dim": 16,
        "value_dim": 16, "grad": False, "window": False, "softcap": False, "sinks": False,
        "page_size": 0, "decode": False,
    }  # fmt: skip
    return CallSpec(**defaults | changes)


def qkv():
    return [torch.randn(3, 2, 16) for _ in range(3)]


def test_sdpa_serves_the_cpu():
    assert (
        selection.select_backend(spec()) == selection.select_backend(spec(page_size=16)) == "sdpa"
    )


def test_the_choice_for_a_kind_of_call_seen_before_is_cached(monkeypatch):
    specs = [spec(), spec(page_size=16)]
    names = list(map(selection.select_backend, specs))
    monkeypatch.setattr(selection, "backend_reason", lambda *_: pytest.fail("asked again"))
    assert list(map(selection.select_backend, specs)) == names


def test_forcing_a_backend_for_all_calls_yields_to_one_for_pages(monkeypatch):
    monkeypatch.setenv("NOPAD_ATTENTION", "torch")
    with selection.force_backend("sdpa"):
        assert (
            selection.select_backend(spec())
            == selection.select_backend(spec(page_size=16))
            == "sdpa"
        )
        with selection.force_paged_backend("triton"):
            assert selection.select_backend(spec()) == "sdpa"
            assert selection.select_backend(spec(page_size=16)) == "triton"  # interpreted
    with pytest.raises(ValueError, match="'torch' does not support this call"):
        selection.select_backend(spec())


def test_without_trials_declared_limits_decide_and_nothing_is_cached(monkeypatch):
    monkeypatch.setattr(selection, "trial_failure", lambda *_: pytest.fail("a trial was made"))
    paged = spec(device="cuda", dtype=torch.bfloat16, page_size=16)
    cached = selection._cached_choice.cache_info().currsize
    with selection.without_trials():
        assert selection.select_backend(paged) == "triton"
        assert selection.select_backend(paged, "flash2") == "flash2"
    assert selection._cached_choice.cache_info().currsize == cached


def test_a_forced_backend_that_cannot_raises_with_the_reason():
    with pytest.raises(ValueError, match="'flash2' does not support this call: it needs CUDA"):
        attend(*qkv(), VARLEN, backend="flash2")


def test_an_unknown_name_raises_with_those_there_are():
    with pytest.raises(ValueError, match=r"no attention backend is called 'flsh'.*sdpa"):
        attend(*qkv(), VARLEN, backend="flsh")


def test_the_environment_forces_a_backend(monkeypatch):
    monkeypatch.setenv("NOPAD_ATTENTION", "torch")
    with pytest.raises(ValueError, match="'torch' does not support"):
        attend(*qkv(), VARLEN)
    monkeypatch.setenv("NOPAD_ATTENTION", "sdpa")
    assert attend(*qkv(), VARLEN).shape == (3, 2, 16)


def test_who_reads_pages_can_be_named_for_a_while():
    with selection.force_paged_backend("flash2"):
        assert selection.select_backend(spec()) == "sdpa"
        with pytest.raises(ValueError, match="'flash2' does not support"):
            selection.select_backend(spec(page_size=256))
    assert selection.select_backend(spec(page_size=256)) == "sdpa"


def test_the_choice_is_said_once_with_what_was_passed_over(caplog):
    selection._cached_choice.cache_clear()
    with caplog.at_level(logging.INFO, "nopad.attention"):
        for _ in range(3):
            attend(*qkv(), VARLEN)
    assert [r.message for r in caplog.records] == [
        "attention: sdpa for packed calls (float32, head dim 16)"
    ]


def test_a_backend_that_computes_wrongly_is_passed_over(monkeypatch):
    """Without the trial, a broken build would give wrong results."""
    monkeypatch.setattr(sdpa, "packed", lambda q, k, v, varlen, score_params: v.clone())
    reason = selection.backend_reason("sdpa", spec())
    assert reason is not None and "off by" in reason


def test_a_head_dim_that_a_build_left_out_is_the_reason_told(monkeypatch):
    """flash-attn built without its narrowest kernels runs wider ones, on scratch too narrow."""
    right = sdpa.packed

    def without_narrow_heads(q, k, v, *rest):
        return right(q, k, v, *rest) if q.shape[-1] > 32 else v.clone()

    monkeypatch.setattr(sdpa, "packed", without_narrow_heads)
    reason = selection.backend_reason("sdpa", spec()) or ""
    assert reason.startswith("it does not support head dim 16 here: its trial call was off by")
    assert reason.endswith("with 64 it was right")


def test_a_backend_that_raises_is_passed_over_with_its_words(monkeypatch):
    def broken(*_):
        raise RuntimeError("built without softcap")

    monkeypatch.setattr(sdpa, "packed", broken)
    assert "built without softcap" in (selection.backend_reason("sdpa", spec()) or "")


def test_a_trial_that_runs_out_of_memory_decides_nothing(monkeypatch):
    """A slower backend would be used from then on, although memory is free again."""

    def full(*_):
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(sdpa, "packed", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            selection.backend_reason("sdpa", spec())
    assert selection.backend_reason("sdpa", spec()) is None


@pytest.mark.parametrize("name", selection.BACKENDS)
def test_trials_do_not_move_the_random_state(name):
    before = torch.get_rng_state()
    selection.backend_reason(name, spec(page_size=16))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("flash2", {"page_size": 16}, "multiple of 256"),
        ("flash2", {"sinks": True, "page_size": 256}, "has no sinks"),
        ("flash2", {"dtype": torch.float32}, "float32"),
        ("flash2", {"key_dim": 300}, "head dim 300"),
        ("flash2", {"value_dim": 8, "page_size": 256}, "value dim 8"),
        ("torch", {"softcap": True}, "softcap"),
        ("torch", {"page_size": 256}, "it does not read pages"),
        ("cudnn", {"page_size": 256}, "it does not read pages"),
        ("triton", {}, "it only reads pages"),
        ("triton", {"page_size": 16, "key_dim": 512}, "over 256"),
    ],
)
def test_declared_limits_are_told(name, changes, reason):
    known = {"device": "cuda", "dtype": torch.bfloat16} | changes
    assert reason in (selection.backend_reason(name, spec(**known)) or "")


@pytest.mark.parametrize(
    ("tokens", "sequences", "longest", "large"),
    [(16384, 40, 4096, True), (4096, 40, 4096, False), (16384, 512, 16384, False)],
)
def test_sequences_that_would_fill_memory_when_padded_are_not_large(
    tokens, sequences, longest, large
):
    q = torch.empty(tokens, 2, 16, device="meta")
    varlen = Varlen(torch.zeros(sequences + 1, dtype=torch.int32), longest)
    assert call_spec(q, q, q, ScoreParams(1.0), varlen).large == large


def test_rows_of_other_lengths_and_counts_compile_no_third_graph():
    """One for the first row, and one for rows that differ from it."""
    torch._dynamo.reset()
    seen = torch._dynamo.testing.CompileCounter()
    call = torch.compile(attend, backend=seen, fullgraph=True)
    for tokens, longest in ((9000, 30), (9030, 15), (10000, 20), (11000, 44)):
        q = torch.randn(tokens, 1, 4)
        bounds = torch.arange(0, tokens + 1, longest).int()
        bounds[-1] = tokens
        assert call(q, q, q, Varlen(bounds, longest)).shape == q.shape
    assert seen.frame_count == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 64), (64, 8, 128), (128, 1, 64)])
def test_a_right_backend_passes_its_trial_whatever_the_size(heads, kv_heads, dim, dtype):
    for grad, page_size in ((True, 0), (False, 0), (False, 16)):
        shape = {"heads": heads, "kv_heads": kv_heads, "key_dim": dim, "value_dim": dim}
        call = spec(**shape, dtype=dtype, grad=grad, page_size=page_size)
        assert selection.backend_reason("sdpa", call) is None


@pytest.mark.parametrize("which", range(3), ids=["queries", "keys", "values"])
def test_a_gradient_is_asked_for_where_any_input_needs_one(which):
    """LoRA on the values alone: in the first layer, nothing else needs a gradient."""
    inputs = qkv()
    assert not call_spec(*inputs, ScoreParams(1.0), VARLEN).grad
    inputs[which].requires_grad_()
    assert call_spec(*inputs, ScoreParams(1.0), VARLEN).grad
    with torch.no_grad():
        assert not call_spec(*inputs, ScoreParams(1.0), VARLEN).grad


def test_pages_refuse_gradients_instead_of_keeping_the_graph_alive():
    cache = PagedCache(2, 16, [(2, 16, 16)], torch.float32, "cpu")
    ints = {"dtype": torch.int32}
    where = torch.tensor([[0]], **ints), torch.tensor([3], **ints), torch.arange(3)
    varlen = Varlen(VARLEN.cu_seqlens, 3, Pages(cache, *where, 3))
    q, k, v = qkv()
    with pytest.raises(ValueError, match="paged attention has no gradients"):
        attend(q, k.requires_grad_(), v, varlen)
    with torch.no_grad():
        attend(q, k, v, varlen)
    assert not cache.layer(0)[0].requires_grad


def test_the_environment_speaks_only_of_calls_that_the_backend_offers(monkeypatch):
    """A run that trains and generates makes both kinds; no one name serves them all."""
    monkeypatch.setenv("NOPAD_ATTENTION", "cudnn")
    assert (
        selection.select_backend(spec(page_size=16)) == "sdpa"
        and selection.forced_paged_backend() is None
    )
    with pytest.raises(ValueError, match="'cudnn' does not support"):
        selection.select_backend(spec())
    monkeypatch.setenv("NOPAD_ATTENTION", "triton")
    assert (
        selection.select_backend(spec()) == "sdpa" and selection.forced_paged_backend() == "triton"
    )
    assert selection.select_backend(spec(page_size=16)) == "triton"  # interpreted
    monkeypatch.setenv("NOPAD_ATTENTION", "flsh")
    with pytest.raises(ValueError, match="no attention backend is called 'flsh'"):
        selection.select_backend(spec())
