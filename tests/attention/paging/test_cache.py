"""The cache's own promises, and the small kernel that writes into it."""

import pytest
import torch
from nopad.attention import PagedCache
from nopad.attention.backends.kv_write import write
from nopad.kernels import write_kv


def test_copies_read_before_they_write():
    cache = PagedCache(4, 16, [(1, 8, 8), (2, 8, 4)], torch.float32, "cpu")
    for layer in range(2):
        for tensor in cache.layer(layer):
            tensor += torch.arange(4.0).view(4, 1, 1, 1)
    cache.copy_pages([0, 1], [1, 2])
    for layer in range(2):
        for tensor in cache.layer(layer):
            assert tensor[:, 0, 0, 0].tolist() == [0, 0, 1, 3]


def test_a_cache_weighs_what_it_says():
    cache = PagedCache(4, 16, [(1, 8, 8), (2, 8, 4)], torch.bfloat16, "cpu")
    held = sum(tensor.nbytes for layer in range(2) for tensor in cache.layer(layer))
    assert cache.page_bytes * cache.num_pages == held


def test_pages_under_sixteen_tokens_are_refused():
    with pytest.raises(ValueError, match="page_size=8 is too small"):
        PagedCache(4, 8, [(1, 8, 8)], torch.float32, "cpu")


@pytest.mark.parametrize("writer", [write, write_kv])
def test_tokens_land_in_their_slots_and_minus_one_nowhere(writer):
    cache = PagedCache(4, 16, [(3, 8, 5)], torch.float32, "cpu")
    keys, values = cache.layer(0)
    k = torch.randn(3, 4, 8).transpose(0, 1)  # as a layer hands it over: heads first
    v = torch.randn(4, 5, 3).transpose(1, 2)
    slots = torch.tensor([33, -1, 0, 63])
    writer(k, v, keys, values, slots)
    for rows, tensor in ((k, keys), (v, values)):
        want = torch.zeros_like(tensor).flatten(0, 1)
        for row, slot in ((0, 33), (2, 0), (3, 63)):
            want[slot] = rows[row]
        assert torch.equal(tensor.flatten(0, 1), want)
