"""What is derived from a batch's tensors is shared by its layers, and by no other batch."""

import gc

import torch
from nopad.attention.hf import interface
from nopad.attention.varlen import batch_cache, in_backward, start_batch
from torch import nn


def test_derived_values_live_until_the_tensor_is_written_or_a_batch_starts():
    bounds = torch.tensor([0, 3, 5])
    batch_cache(bounds)["x"] = 1
    assert batch_cache(bounds) == {"x": 1}
    bounds[1] = 2
    assert batch_cache(bounds) == {}
    batch_cache(bounds)["x"] = 2
    start_batch(None, bounds)
    assert batch_cache(bounds) == {}


def test_equal_tensors_do_not_share_and_entries_die_with_their_tensor():
    from nopad.attention import varlen

    first, second = torch.tensor([0, 3]), torch.tensor([0, 3])
    before = len(varlen._batches)
    batch_cache(first)["x"] = 1
    assert batch_cache(second) == {} and len(varlen._batches) == before + 2
    del first, second
    gc.collect()
    assert len(varlen._batches) == before


def test_a_tensor_without_a_version_is_never_remembered():
    with torch.inference_mode():
        bounds = torch.tensor([0, 3])
    batch_cache(bounds)["x"] = 1
    assert batch_cache(bounds) == {}


def test_layers_recomputed_in_a_backward_belong_to_their_batch():
    bounds, seen = torch.tensor([0, 3]), []
    batch_cache(bounds)["x"] = 1

    def hook(grad):
        start_batch(bounds)
        seen.append((in_backward(), dict(batch_cache(bounds))))

    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(hook)
    assert not in_backward()
    weight.sum().backward()
    assert seen == [(True, {"x": 1})]


def test_positions_are_read_once_a_batch(monkeypatch):
    module, x, read = nn.Module(), torch.randn(1, 2, 8, 4), []
    original = interface._varlen_of_positions

    def counted(positions, device):
        read.append(positions.tolist())
        return original(positions, device)

    monkeypatch.setattr(interface, "_varlen_of_positions", counted)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])

    def forward():
        outputs = []
        for module.layer_idx in range(3):
            outputs.append(interface.attention(module, x, x, x, None, position_ids=positions)[0])
        return outputs

    first = forward()
    assert len(read) == 1
    positions.data[0, 3:] = torch.arange(3, 8)  # refilled without a new version
    second = forward()
    assert len(read) == 2 and not torch.equal(first[0], second[0])
    assert torch.equal(second[0], second[2])
