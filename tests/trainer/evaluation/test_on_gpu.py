"""Evaluations between training steps on a GPU: bitwise no trace, no growth, and memory given back.

The same checks run on a CPU where that means something; there, running out of memory is staged.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch
import untouched
from nopad.inference import Engine
from nopad.trainer.evaluation import GenerationEval

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by deterministic kernels
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROOM = 1 << 26


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


class Training:
    """Steps on packs of random tokens, in bf16 on a GPU."""

    def __init__(self, device: str):
        self.model = untouched.model().to(device)
        if device == "cuda":
            self.model = self.model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.model.train()
        self.device = device
        torch.manual_seed(0)

    def step(self, number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(1, 60, (1, 48), generator=draw).to(self.device)
        bounds = torch.tensor([0, 20, 29, 48], dtype=torch.int32, device=self.device)
        positions = torch.cat([torch.arange(n) for n in (20, 9, 19)])[None].to(self.device)
        batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}
        lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        self.model(**batch, **lengths, max_length_q=20, max_length_k=20).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[bytes]:
        """Weights, optimizer and the random state, bit by bit."""
        slots = [t for s in self.optimizer.state.values() for t in s.values()]
        tensors = [*self.model.parameters(), *slots, torch.get_rng_state()]
        if self.device == "cuda":
            tensors.append(torch.cuda.get_rng_state())
        flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        return [t.numpy().tobytes() for t in flat]


def evaluation(source) -> GenerationEval:
    params = untouched.PARAMS["sampled"]
    return GenerationEval(source, untouched.EXAMPLES, {"exact": lambda a, b: a == b}, params)


def bitwise(device: str, source_of) -> list:
    """Train with evaluations and without; the states must be equal. What the reports said."""
    finals, reports = [], []
    for evaluates in (True, False):
        run = Training(device)
        check = evaluation(source_of(run.model)) if evaluates else None
        for number in range(12):
            run.step(number)
            if check is not None and number % 3 == 2:
                reports.append(check.run(number))
        finals.append(run.state())
    assert finals[0] == finals[1]
    return reports


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_training_with_evaluations_is_bitwise_training_without(device, keep, deterministic):
    reports = bitwise(device, lambda model: Engine(model, memory=ROOM, keep_memory=keep).generate)
    assert [(r.error, r.metrics["eval/examples"]) for r in reports] == [(None, 3)] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_running_out_of_memory_in_an_evaluation_is_told(device, deterministic):
    def source_of(model):
        engine = Engine(model, memory=ROOM)

        def generate(prompts, params, deadline=None):
            engine.generate(prompts, params, deadline=deadline)
            if device == "cpu":
                raise torch.OutOfMemoryError("staged")
            return torch.empty(1 << 50, dtype=torch.uint8, device=device)

        return generate

    for report in bitwise(device, source_of):
        assert report.error is not None and report.error.startswith("OutOfMemoryError")


@pytest.mark.gpu
def test_an_engine_that_asks_for_too_much_says_so(deterministic):
    def source_of(model):
        wide = {"page_size": 1 << 16, "max_num_seqs": 1 << 14}  # pages for 275 GB
        return Engine(model, memory=1 << 40, **wide).generate

    for report in bitwise("cuda", source_of):
        assert report.error is not None and "OutOfMemoryError" in report.error


@pytest.mark.gpu
@pytest.mark.parametrize(("keep", "evaluations"), [(True, 100), (False, 12)])
def test_nothing_grows_over_evaluations(keep, evaluations):
    run = Training("cuda")
    check = evaluation(Engine(run.model, memory=ROOM, keep_memory=keep).generate)
    allocated, reserved = [], []
    for number in range(3 + evaluations):
        run.step(number)
        gc.collect()
        before = torch.cuda.memory_allocated()
        assert check.run(number).error is None
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
        if not keep and number > 2:
            assert allocated[-1] == before, "what an evaluation took is given back"
    # Each evaluation draws other text, so a buffer may still grow to its last size for a while.
    assert len(set(allocated[3 + evaluations // 2 :])) == 1, "no byte more in the second half"
    assert max(allocated[3:]) - allocated[3] < 1 << 16
    assert max(reserved[3:]) == reserved[3]
