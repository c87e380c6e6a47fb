"""Offloaded checkpoints: the same loss and gradients to the bit, the inputs on the host."""

from __future__ import annotations

from copy import deepcopy

import nopad.trainer.checkpoint_offload as module
import pytest
import torch
from nopad import offload_checkpoints
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).train()


def gradients(model: LlamaForCausalLM, device: str = "cpu", length: int = 40) -> list[torch.Tensor]:
    ids = torch.arange(length, device=device)[None] % 64
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_same_gradients_and_every_layer_is_offloaded(monkeypatch: pytest.MonkeyPatch):
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    expected = gradients(model)
    monkeypatch.setattr(module, "MIN_BYTES", 1)
    fetched = []
    fetch = module._HostTensor.fetch
    monkeypatch.setattr(module._HostTensor, "fetch", lambda t: fetched.append(t) or fetch(t))
    offload_checkpoints(model)
    offload_checkpoints(model)  # once
    for _ in range(2):
        fetched.clear()
        assert_same(gradients(model), expected)
        assert len(fetched) >= 3
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    assert_same(gradients(deepcopy(model)), expected)


def test_a_forward_that_raises_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch):
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    expected = gradients(model)
    monkeypatch.setattr(module, "MIN_BYTES", 1)
    offload_checkpoints(model)
    with monkeypatch.context() as broken:
        broken.setattr(model.model.layers[1], "forward", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gradients(model)
    packed = []
    x = torch.ones(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        (x * x).sum().backward()
    assert packed
    assert_same(gradients(model), expected)


def test_without_checkpointing_it_is_refused():
    model = tiny_llama()
    offload_checkpoints(model)
    with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
        gradients(model)


@pytest.mark.gpu
def test_on_a_gpu_less_memory_and_the_same_bits():
    peaks, results = [], []
    for offloads in (False, True):
        model = tiny_llama(layers=12).to("cuda")
        model.gradient_checkpointing_enable()
        if offloads:
            offload_checkpoints(model)
        gradients(model, "cuda", 64)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results.append(gradients(model, "cuda", 16384))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # embedding's sums are not ordered
    assert peaks[1] < peaks[0] - 7 * 16384 * 32 * 4
