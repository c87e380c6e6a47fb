"""flash-attn from its package or through `kernels`: which one is found, and what it is handed."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from nopad.attention import Varlen
from nopad.attention.backends import CallSpec, ScoreParams, flash2, flash3, flash_library, selection
from nopad.attention.reference import one_sequence

HOPPER_CALL = CallSpec("cuda", torch.bfloat16, 4, 2, 64, 64, False, False, False, False, 0, False)
PACKAGES = {"flash2": "flash_attn", "flash3": "flash_attn_interface"}
BUILDS = {"flash2": "kernels-community/flash-attn2", "flash3": "kernels-community/flash-attn3"}


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
def hopper_without_libraries(monkeypatch):
    """A Hopper GPU as far as questions go, with nothing installed."""
    for name in (*PACKAGES.values(), "kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(selection, "trial_failure", lambda backend, spec: None)
    caches = flash_library._found.clear, selection._cached_choice.cache_clear
    for clear in caches:
        clear()
    yield
    for clear in caches:
        clear()


def offer_builds(monkeypatch, *wanted):
    """A `kernels` package that has some builds."""

    def get_kernel(name):
        if name not in [BUILDS[w] for w in wanted]:
            raise FileNotFoundError(name)
        return LIBRARY

    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))


@pytest.mark.parametrize("name", PACKAGES)
def test_without_package_and_kernels_the_package_is_named(name):
    reason = selection.unsupported_reason(name, HOPPER_CALL) or ""
    assert f"{PACKAGES[name]} is not installed" in reason


@pytest.mark.parametrize("name", PACKAGES)
def test_a_prebuilt_build_serves_where_the_package_is_missing(monkeypatch, name):
    offer_builds(monkeypatch, name)
    assert selection.unsupported_reason(name, HOPPER_CALL) is None
    assert flash_library.find(*selection.BACKEND_MODULES[name].LIBRARY) == (LIBRARY, None)


def test_the_package_goes_before_the_build(monkeypatch):
    package = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    offer_builds(monkeypatch, "flash2")
    assert selection.unsupported_reason("flash2", HOPPER_CALL) is None
    assert flash_library.find(*flash2.LIBRARY) == (package, None)


@pytest.mark.parametrize(
    ("builds", "first"), [(("flash2", "flash3"), "flash3"), (("flash2",), "flash2")]
)
def test_the_best_build_there_is_gets_chosen(monkeypatch, builds, first):
    offer_builds(monkeypatch, *builds)
    assert selection.select_backend(HOPPER_CALL) == first


@pytest.mark.parametrize("backend", [flash2, flash3], ids=["flash2", "flash3"])
@pytest.mark.parametrize("window", [None, 3])
def test_the_library_is_told_scale_window_and_softcap(monkeypatch, backend, window):
    monkeypatch.setitem(flash_library._found, backend.LIBRARY[0], (LIBRARY, None))
    q, k, v = (torch.randn(7, heads, 8) for heads in (4, 2, 2))
    varlen = Varlen(torch.tensor([0, 5, 7], dtype=torch.int32), 5)
    scores = ScoreParams(scale=0.3, window=window, softcap=2.0)
    want = varlen_func(
        q, k, v, varlen.cu_seqlens, None, 5, 5,
        softmax_scale=0.3, softcap=2.0, window_size=(-1, -1) if window is None else (2, 0),
    )  # fmt: skip
    assert torch.equal(backend.packed(q, k, v, varlen, scores), want)
    assert varlen_func.kwargs["causal"] is True
