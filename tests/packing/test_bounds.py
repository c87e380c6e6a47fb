"""Bounds: one enormous document, a million of them, and the size of a state."""

import gc
import json
import resource
import tracemalloc

import numpy as np
import pytest
from nopad.packing import PackedDataset, Packer, Sample
from nopad.packing.ordering import Position, RankShare
from nopad.packing.sources import TokenArray


def test_a_document_of_ten_million_tokens_takes_little_memory():
    tokens = np.arange(10_000_000) % 1000
    packer = Packer(8192, pool=64)
    gc.collect()
    tracemalloc.start()
    packed = sum(len(pack.tokens) for pack in packer.add([Sample(tokens)]))
    packed += sum(len(pack.tokens) for pack in packer.finish())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"peak {peak / tokens.nbytes:.2f} times the bytes of the document")
    assert packed == len(tokens) and peak <= 4 * tokens.nbytes


def resident() -> float:
    """Megabytes of this process now, not at its peak."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


@pytest.mark.parametrize("count", [1_000_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_millions_of_planned_documents_do_not_grow_the_process(count):
    lengths = np.full(count, 3, np.int32)
    lengths[::7] = 11
    flat = np.zeros(64, np.uint16)
    array = TokenArray("flat", flat, np.zeros(count, np.int64), lengths)
    packs = PackedDataset(array, budget=8192).reader.read(Position(end_epoch=1), RankShare(), 0)
    after, seen = None, 0
    for number, pack in enumerate(packs):
        seen += len(pack.samples)
        if number == 64:
            after = resident()
    growth = resident() - after
    print(f"{growth:.1f} MB growth over {seen} documents")
    assert seen == count and growth < 20


def test_a_hundred_thousand_streamed_documents_do_not_grow_the_process():
    row = np.arange(12)
    data = PackedDataset(lambda: (row for _ in range(100_000)), budget=4096, shards=1)
    after, seen = None, 0
    for number, pack in enumerate(data):
        seen += len(pack.samples)
        if number == 20:
            after = resident()
    growth = resident() - after
    print(f"{growth:.1f} MB growth over {seen} documents")
    assert seen == 100_000 and growth < 20


def rows_of_real_lengths():
    rng = np.random.default_rng(0)
    for n in np.clip(rng.lognormal(np.log(350), 1.1, 12_000), 1, 100_000).astype(int):
        yield np.zeros(n, np.int64)


def test_a_state_has_at_most_32_kilobytes_and_12_for_each_shard():
    data = PackedDataset(rows_of_real_lengths, budget=2048, pool=1024, shards=1)
    largest = 0
    for number, _ in enumerate(data):
        if number % 16 == 0:
            state = data.state_dict()
            shard = len(json.dumps(state.get("shards", {})))
            largest = max(largest, shard)
            assert len(json.dumps(state)) - shard <= 32_000
    print(f"a shard's state took at most {largest} bytes")
    assert largest <= 12_000


def test_a_planned_state_does_not_grow_with_the_data():
    rows = [np.arange(5)] * 3000
    data = PackedDataset(rows, budget=64)
    packs = iter(data)
    sizes = []
    for _ in range(200):
        next(packs)
        sizes.append(len(json.dumps(data.state_dict())))
    assert max(sizes) < 1000
