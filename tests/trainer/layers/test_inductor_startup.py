"""Inductor is loaded while a run on a GPU is prepared, and before its first graph is traced."""

from __future__ import annotations

import os
import sys
from threading import Event, Timer

import pytest
import tiny_run
import torch
import torch._inductor.async_compile
from nopad.trainer.layers import compile_layers, inductor_startup
from nopad.trainer.layers.inductor_startup import start_inductor, wait_for_inductor

module = sys.modules[compile_layers.__module__]


@pytest.fixture(autouse=True)
def not_started(monkeypatch):
    monkeypatch.setattr(inductor_startup, "_started", [])
    monkeypatch.setenv("TRITON_CACHE_DIR", "/some/folder")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiled_layers_on_a_gpu_start_inductor(monkeypatch, device):
    started = []
    monkeypatch.setattr(module, "start_inductor", started.append)
    forward = module.CompiledForward({})
    module.compile_with(forward, tiny_run.model(), torch.device(device)).undo()
    assert started == ([0] if device == "cuda" else [])


def test_the_first_compiled_call_waits_until_inductor_is_loaded(monkeypatch):
    loaded, events = Event(), []
    monkeypatch.setattr(inductor_startup, "_load", loaded.wait)
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: events.append(loaded.is_set()))
    start_inductor(0)
    Timer(0.2, loaded.set).start()
    module.CompiledForward({})._compiled(len)
    assert events == [True]


def test_inductor_is_loaded_once_with_the_processes_that_compile(monkeypatch):
    pools = []
    monkeypatch.setattr(torch._inductor.async_compile, "maybe_warm_pool", lambda: pools.append(1))
    start_inductor(0)
    start_inductor(0)
    wait_for_inductor()
    assert pools == [1] and "torch._inductor.compile_fx" in sys.modules


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_fails_to_load_is_left_to_the_first_graph(monkeypatch):
    monkeypatch.setattr(torch._inductor.async_compile, "maybe_warm_pool", None)
    start_inductor(0)
    wait_for_inductor()


def test_kernels_are_cached_where_inductor_would_cache_them(monkeypatch, tmp_path):
    monkeypatch.setattr(inductor_startup, "_load", lambda: None)
    start_inductor(0)
    assert os.environ["TRITON_CACHE_DIR"] == "/some/folder"  # the user's choice
    monkeypatch.setattr(inductor_startup, "_started", [])
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    start_inductor(1)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton" / "1")
