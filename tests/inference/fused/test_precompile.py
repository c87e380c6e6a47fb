"""What a rehearsal leaves out and puts back; the compiling itself shows on a GPU only."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="kernels are Triton's")

from nopad.attention.backends import selection
from nopad.inference.fused import precompile as stage
from triton import knobs

PACKED = ("cpu", torch.float32, 4, 2, 64, 64, False, False, False, False, 0, False, False)
DECODE = ("cuda", torch.bfloat16, 32, 8, 64, 64, False, False, False, False, 256, True, False)


@pytest.fixture
def compiled(monkeypatch) -> list:
    found = []
    monkeypatch.setattr(stage, "_compile", lambda missing, device: found.extend(missing))
    return found


def launch(module: str, key: str = "1") -> bool | None:
    """What Triton asks before it compiles a kernel; True: leave it out."""
    kernel = SimpleNamespace(module=module, name="_product", jit_function=module)
    hook = knobs.runtime.jit_cache_hook
    return hook(key=key, fn=kernel, compile={"specialization_data": key}) if hook else None


def test_kernels_of_ours_are_left_out_and_compiled_once_each(compiled):
    with stage.rehearsal(torch.device("cpu")):
        assert launch("nopad.kernels.skinny_kernels") and launch("nopad.kernels.skinny_kernels")
        assert launch("nopad.kernels.paged_decode", "2")
        assert not launch("liger_kernel.ops")
        assert not compiled
    assert [key for _, key in compiled] == ["1", "2"]


def test_nothing_is_left_changed_even_if_the_call_fails(compiled, monkeypatch):
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", theirs := lambda **launch: False)
    choose = selection.choose
    with pytest.raises(ZeroDivisionError), stage.rehearsal(torch.device("cpu")):
        assert selection.choose is not choose
        raise ZeroDivisionError
    assert selection.choose is choose and knobs.runtime.jit_cache_hook is theirs
    assert not compiled


def test_no_backend_is_judged_by_what_a_rehearsal_computes(compiled, monkeypatch):
    """Once one was: its trial's kernels were left out, so it was found wrong, and passed over."""
    monkeypatch.setattr(selection, "_trial", lambda name, ask: pytest.fail("a trial was made"))
    with stage.rehearsal(torch.device("cpu")):
        assert selection.choose(DECODE) == "triton"
        with selection.reading_pages_by("flash2"):
            assert selection.choose(DECODE) == "flash2"


def test_other_threads_choose_as_ever_during_a_rehearsal(compiled, monkeypatch):
    monkeypatch.setattr(selection, "choose", lambda facts, forced=None: "theirs")
    chosen = []
    with stage.rehearsal(torch.device("cpu")):
        other = Thread(target=lambda: chosen.append(selection.choose(DECODE)))
        other.start()
        other.join()
        assert selection.choose(DECODE) == "triton"
    assert chosen == ["theirs"]


def test_a_call_without_pages_is_not_given_to_the_reader_of_pages(compiled):
    with stage.rehearsal(torch.device("cpu")), selection.reading_pages_by("triton"):
        assert selection.choose(PACKED) == "sdpa"
