"""What a rehearsal leaves out and puts back; the compiling itself shows on a GPU only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="kernels are Triton's")

from nopad.attention.backends import choice
from nopad.inference import rehearsal as stage
from triton import knobs

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
        assert launch("nopad.inference.skinny_kernels") and launch("nopad.inference.skinny_kernels")
        assert launch("nopad.attention.backends.triton_decode", "2")
        assert not launch("liger_kernel.ops")
        assert not compiled
    assert [key for _, key in compiled] == ["1", "2"]


def test_nothing_is_left_changed_even_if_the_call_fails(compiled, monkeypatch):
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", theirs := lambda **launch: False)
    choose = choice.choose
    with pytest.raises(ZeroDivisionError), stage.rehearsal(torch.device("cpu")):
        assert choice.choose is not choose
        raise ZeroDivisionError
    assert choice.choose is choose and knobs.runtime.jit_cache_hook is theirs
    assert not compiled


def test_no_backend_is_judged_by_what_a_rehearsal_computes(compiled, monkeypatch):
    """Once one was: its trial's kernels were left out, so it was found wrong, and passed over."""
    monkeypatch.setattr(choice, "_trial", lambda name, ask: pytest.fail("a trial was made"))
    with stage.rehearsal(torch.device("cpu")):
        assert choice.choose(DECODE) == "triton"
        with choice.reading_pages_by("flash2"):
            assert choice.choose(DECODE) == "flash2"
