"""Which launches precompilation skips and what it restores; compiling itself needs a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="kernels are Triton's")

from nopad.attention.backends import CallSpec, selection
from nopad.inference.fused import precompile as stage
from triton import knobs

PACKED = CallSpec("cpu", torch.float32, 4, 2, 64, 64, False, False, False, False, 0, False)
DECODE = CallSpec("cuda", torch.bfloat16, 32, 8, 64, 64, False, False, False, False, 256, True)


def launch(module: str, key: str = "1") -> bool | None:
    """What Triton asks before it compiles a kernel; True: leave it out."""
    kernel = SimpleNamespace(module=module, name="_product", jit_function=module)
    hook = knobs.runtime.jit_cache_hook
    return hook(key=key, fn=kernel, compile={"specialization_data": key}) if hook else None


def test_kernels_of_ours_are_left_out_and_recorded_once_each():
    with stage.record_missing() as missing:
        assert launch("nopad.kernels.skinny_gemm") and launch("nopad.kernels.skinny_gemm")
        assert launch("nopad.kernels.paged_decode", "2")
        assert not launch("liger_kernel.ops")
    assert [key for _, key in missing] == ["1", "2"]


def test_kernels_are_handed_to_the_compilers_at_once_the_longest_first(monkeypatch):
    monkeypatch.setattr(stage, "_CompilePool", lambda device, bar: ThreadPoolExecutor(1))
    handed: list[str] = []
    short, long = (SimpleNamespace(preload=handed.append, src="x" * n) for n in (1, 9))
    missing = [(short, "1"), (long, "2"), (short, "3")]
    with stage.compile_in_background(missing, torch.device("cpu")):
        assert handed == ["2", "1", "3"] and knobs.compilation.store_binary_only
    assert not knobs.compilation.store_binary_only


def test_nothing_is_left_changed_even_if_the_call_fails(monkeypatch):
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", theirs := lambda **launch: False)
    with pytest.raises(ZeroDivisionError), stage.record_missing():
        assert not selection._trials.get() and knobs.runtime.jit_cache_hook is not theirs
        raise ZeroDivisionError
    assert selection._trials.get() and knobs.runtime.jit_cache_hook is theirs


def test_no_backend_is_judged_by_what_a_rehearsal_computes(monkeypatch):
    """Once one was: its trial's kernels were skipped, so it was found wrong, and not selected."""
    monkeypatch.setattr(selection, "trial_failure", lambda *_: pytest.fail("a trial was made"))
    with stage.record_missing():
        assert selection.select_backend(DECODE) == "triton"
        with selection.force_paged_backend("flash2"):
            assert selection.select_backend(DECODE) == "flash2"


def test_other_threads_choose_as_ever_during_a_rehearsal(monkeypatch):
    monkeypatch.setattr(selection, "_cached_choice", lambda *_: "theirs")
    chosen = []
    with stage.record_missing():
        other = Thread(target=lambda: chosen.append(selection.select_backend(DECODE)))
        other.start()
        other.join()
        assert selection.select_backend(DECODE) == "triton"
    assert chosen == ["theirs"]


def test_a_call_without_pages_is_not_given_to_the_reader_of_pages():
    with stage.record_missing(), selection.force_paged_backend("triton"):
        assert selection.select_backend(PACKED) == "sdpa"
