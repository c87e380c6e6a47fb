"""flash-attn 2 from its package or through `kernels`: which one is found, and its arguments."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from nopad.attention import Varlen
from nopad.attention.backends import CallSpec, ScoreParams, flash2, selection
from nopad.attention.reference import one_sequence

CUDA_CALL = CallSpec("cuda", torch.bfloat16, 4, 2, 64, 64, False, False, False, False, 0, False)


def varlen_func(q, k, v, bounds, key_bounds, longest, longest_key, **kwargs):
    """The library's function, by the oracle; remembers its keyword arguments."""
    varlen_func.kwargs = kwargs
    ends = bounds.tolist()
    params = {"scale": kwargs["softmax_scale"], "softcap": kwargs["softcap"] or None, "sinks": None}
    window = None if kwargs["window_size"] == (-1, -1) else kwargs["window_size"][0] + 1
    parts = [slice(a, b) for a, b in pairwise(ends)]
    return torch.cat([one_sequence(q[p], k[p], v[p], window=window, **params) for p in parts])


LIBRARY = SimpleNamespace(flash_attn_varlen_func=varlen_func)


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch):
    """Nothing is installed, and no trial is run."""
    for name in ("flash_attn", "kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(selection, "trial_failure", lambda backend, spec: None)
    caches = flash2._found.clear, selection._cached_choice.cache_clear
    for clear in caches:
        clear()
    yield
    for clear in caches:
        clear()


def offer_build(monkeypatch):
    """A `kernels` package that has the build."""

    def get_kernel(name):
        assert name == "kernels-community/flash-attn2"
        return LIBRARY

    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))


def test_without_package_and_kernels_the_package_is_named():
    reason = selection.backend_reason("flash2", CUDA_CALL) or ""
    assert "flash_attn is not installed" in reason


def test_a_prebuilt_build_serves_where_the_package_is_missing(monkeypatch):
    offer_build(monkeypatch)
    assert selection.backend_reason("flash2", CUDA_CALL) is None
    assert flash2.library() == (LIBRARY, None)
    assert selection.select_backend(CUDA_CALL) == "flash2"


def test_the_package_goes_before_the_build(monkeypatch):
    package = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    offer_build(monkeypatch)
    assert selection.backend_reason("flash2", CUDA_CALL) is None
    assert flash2.library() == (package, None)


@pytest.mark.parametrize("window", [None, 3])
def test_the_library_is_told_scale_window_and_softcap(monkeypatch, window):
    monkeypatch.setattr(flash2, "_found", [(LIBRARY, None)])
    q, k, v = (torch.randn(7, heads, 8) for heads in (4, 2, 2))
    varlen = Varlen(torch.tensor([0, 5, 7], dtype=torch.int32), 5)
    scores = ScoreParams(scale=0.3, window=window, softcap=2.0)
    want = varlen_func(
        q, k, v, varlen.cu_seqlens, None, 5, 5,
        softmax_scale=0.3, softcap=2.0, window_size=(-1, -1) if window is None else (2, 0),
    )  # fmt: skip
    assert torch.equal(flash2.packed(q, k, v, varlen, scores), want)
    assert varlen_func.kwargs["causal"] is True
