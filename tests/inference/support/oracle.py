"""An oracle instead of a model: the next token is a hash of the keys that are read.

No numerics are involved, so a single wrong KV slot, stale page or shifted position changes tokens.
"""

from __future__ import annotations

import numpy as np
from nopad.attention import PageAllocator
from nopad.inference.metrics.stats import Stats
from nopad.inference.requests.draws import splitmix64, uniform
from nopad.inference.requests.request import Request
from nopad.inference.scheduling.cache_checker import CacheChecker, check_scheduler
from nopad.inference.scheduling.loop import StepLoop
from nopad.inference.scheduling.scheduler import Scheduler
from nopad.inference.scheduling.step import Step, StepOutput

VOCAB_SIZE = 50
POSITION_KEYS = splitmix64(np.arange(1, 1025, dtype=np.uint64))


def slot_content(positions, tokens) -> np.ndarray:
    """What a KV slot holds after a token was written there."""
    return splitmix64(
        np.asarray(positions, np.uint64) * np.uint64(1009) + np.asarray(tokens, np.uint64)
    )


def next_token(contents: np.ndarray, random_number: float = 0.0) -> int:
    """The token that follows the contents read, in the order of positions."""
    total = splitmix64(contents ^ POSITION_KEYS[: len(contents)]).sum(dtype=np.uint64)
    salt = np.uint64(int(random_number * 2**40))
    return int(splitmix64(np.array([total ^ salt]))[0] % np.uint64(VOCAB_SIZE))


class OracleRunner:
    """Runs steps on an array of KV slots instead of a model."""

    step_sizes = ()

    def __init__(
        self, num_pages: int, page_size: int, num_rows: int, lookahead: int, check: bool = True
    ):
        self.lookahead, self.page_size = lookahead, page_size
        self.kv = np.zeros((num_pages, page_size), np.uint64)
        self.last_tokens = np.zeros(num_rows, np.int64)
        self.checker = CacheChecker(num_pages, page_size) if check and lookahead == 0 else None
        self.num_computed_tokens = 0

    def copy_pages(self, copies) -> None:
        self.kv[[c.target for c in copies]] = self.kv[[c.source for c in copies]]
        if self.checker:
            self.checker.copy(copies)

    def launch(self, step: Step):
        if self.checker:
            self.checker.check(step, "")
        self.num_computed_tokens += len(step.token_ids)
        on_device = self.last_tokens[np.maximum(-1 - step.token_ids, 0)]
        ids = np.where(step.token_ids < 0, on_device, step.token_ids)
        flat = self.kv.reshape(-1)
        flat[step.kv_slots] = slot_content(step.positions, ids)
        random_numbers, temperature = step.sampling.uniform, step.sampling.temperature
        tokens = []
        for i, index in enumerate(step.logits_indices[: len(step.sampled_requests)]):
            sequence = int(np.searchsorted(step.cu_seqlens, index, side="right")) - 1
            later = step.cu_seqlens[sequence + 1] - 1 - index  # tokens of a draft
            positions = np.arange(step.seq_lens[sequence] - later)
            pages = step.page_table[sequence, positions // self.page_size]
            contents = flat[pages * self.page_size + positions % self.page_size]
            is_random = random_numbers is not None and temperature is not None
            is_random = is_random and temperature[i] > 0
            tokens.append(next_token(contents, float(random_numbers[i]) if is_random else 0.0))
        self.last_tokens[step.sampled_rows] = tokens
        sampled = np.array(tokens, np.int64)
        return lambda: StepOutput(sampled)


class World:
    """Scheduler, loop and oracle over one small cache."""

    def __init__(
        self,
        num_pages,
        page_size,
        *,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        lookahead=0,
        check=True,
        **options,
    ):
        self.scheduler = Scheduler(
            PageAllocator(num_pages, page_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=1024,
            **options,
        )
        self.runner = OracleRunner(num_pages, page_size, max_num_seqs, lookahead, check)
        self.time = 0.0
        self.stats = Stats()
        self.loop = StepLoop(self.scheduler, self.runner, self.stats, lambda: self.time)

    def step(self) -> list[Request]:
        self.time += 1
        updated = self.loop.step()
        check_scheduler(self.scheduler)
        return updated

    def drain(self, max_steps: int) -> int:
        """Run to the end; return the number of steps, at most `max_steps`."""
        steps = 0
        while self.loop.busy:
            assert steps < max_steps, f"not done after {max_steps} steps"
            self.step()
            steps += 1
        return steps


def tokens_alone(request: Request) -> list[int]:
    """The tokens that a request gets if it is the only one."""
    tokens = request.prompt_token_ids.tolist()
    output: list[int] = []
    while len(tokens) < request.max_len:
        number = 0.0
        if request.params.temperature:
            number = float(uniform(np.array([request.seed]), np.array([len(tokens)]))[0])
        output.append(next_token(slot_content(np.arange(len(tokens)), tokens), number))
        tokens.append(output[-1])
        if output[-1] in request.stop_token_ids:
            break
    return output
