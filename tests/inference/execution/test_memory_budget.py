"""`memory="spare"`: what training leaves unused on a GPU, by the numbers that torch reports."""

from __future__ import annotations

import gc

import pytest
import torch
from nopad.inference.execution import memory_budget
from nopad.inference.execution.memory_budget import budget_bytes, count_engine_bytes

DEVICE, TOTAL = torch.device("cuda", 0), 1000


class FakeGPU:
    """The allocator of a GPU with 1,000 bytes: blocks that are freed stay reserved."""

    def __init__(self, monkeypatch):
        self.allocated = self.reserved = self.peak = 0
        monkeypatch.setattr(memory_budget, "_usage", {})
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.reserved)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: self.peak)
        free = lambda _: (TOTAL - self.reserved, TOTAL)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "mem_get_info", free)

    def allocate(self, size):
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.reserved)

    def free(self, size, *, empty_cache=False):
        self.allocated -= size
        if empty_cache:
            self.reserved = self.allocated

    def train(self, size):
        self.allocate(size)
        self.free(size)

    def add_engine(self, size):
        self.pages, self.size = type("Pages", (), {})(), size
        self.allocate(size)
        count_engine_bytes(self.pages, size, DEVICE)

    def release_engine(self):
        del self.pages
        gc.collect()
        self.free(self.size, empty_cache=True)

    @property
    def spare(self):
        return budget_bytes("spare", DEVICE)


@pytest.fixture
def gpu(monkeypatch):
    return FakeGPU(monkeypatch)


def test_spare_is_nine_tenths_of_what_training_leaves(gpu):
    gpu.allocate(100)
    gpu.train(300)
    assert gpu.spare == 540


@pytest.mark.parametrize("training", [200, 500])
def test_an_engine_released_before_training_hides_nothing_of_its_peak(gpu, training):
    gpu.allocate(100)
    gpu.add_engine(400)
    gpu.train(50)  # activations of its forwards
    gpu.release_engine()
    gpu.train(training)
    assert gpu.spare == (900 - training) * 9 // 10


def test_pages_beside_training_are_not_in_its_peak(gpu):
    gpu.allocate(100)
    gpu.train(200)
    gpu.add_engine(500)
    gpu.train(300)
    gpu.release_engine()
    assert gpu.spare == 540


def test_training_beside_a_smaller_engine_than_an_earlier_one(gpu):
    gpu.allocate(100)
    gpu.add_engine(700)
    gpu.train(100)
    gpu.release_engine()
    gpu.add_engine(200)
    gpu.train(400)  # below the old peak
    gpu.release_engine()
    assert gpu.spare == 450
