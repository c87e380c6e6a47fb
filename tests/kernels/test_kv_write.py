"""Keys and values written into the cache by our kernel, and by torch where it does not run."""

import pytest
import torch
from nopad.attention import PagedCache
from nopad.attention.backends.kv_write import write
from nopad.kernels import write_kv

pytestmark = pytest.mark.usefixtures("interpreted")


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
