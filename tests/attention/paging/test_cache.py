"""The cache's own promises."""

import pytest
import torch
from nopad.attention import PagedCache


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
