"""The peers of bench_generation: Transformers' continuous batching, and static batches."""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch
from record import timed
from transformers import GenerationConfig

from .report import add_row
from .workloads import Workload

_skipped = False
TIMEOUT = 25.0
"""Seconds after which continuous batching's unfinished requests are cancelled."""


def skip_peers() -> None:
    """Run no peer in this process."""
    global _skipped
    _skipped = True


def peers_run() -> bool:
    """Return whether peers run."""
    return not _skipped


def run_continuous(name: str, model, work: Workload, floor: float) -> tuple[float, float, float]:
    """Time continuous batching: a plain call, its generation alone, and a second call.

    A plain call does what `generate_batch` does: create a manager, run the requests, stop it. The
    second call reuses the manager.
    """
    torch.cuda.synchronize()
    start = time.perf_counter()
    with continuous_batching(model, max(work.new), work) as manager:
        opened = time.perf_counter() - start
        first, _ = timed(lambda: run_requests(manager, work.prompts, work.new))
        warm, _ = timed(lambda: run_requests(manager, work.prompts, work.new))
    add_row(
        name, "transformers continuous batching", warm, work.new_tokens, floor,
        plain_call=opened + first, making_its_manager=opened, requests=len(work.new),
    )  # fmt: skip
    return opened + first, first, warm


@contextmanager
def continuous_batching(model, max_new_tokens: int, work: Workload | None = None):
    """Yield a manager with its fastest settings: flash-attn 2, and 8192 tokens per step.

    It gets the lengths of `work` as hints, as `generate_batch` gives them. The model's settings are
    restored afterwards, also after an error.
    """
    config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=-1)
    before = model.config._attn_implementation, model.config.dtype, model.training
    try:
        try:
            model.set_attn_implementation("flash_attention_2")
        except Exception as error:
            print(f"continuous batching runs without flash-attn 2: {type(error).__name__}")
        model.config.dtype = next(model.parameters()).dtype
        model.eval()
        options = {"generation_config": config, "timeout": 10.0, **step_size_option()}
        if work is not None:
            options |= workload_hints(work)
        with model.continuous_batching_context_manager(**options) as manager:
            yield manager
    finally:
        model.set_attn_implementation(before[0])
        model.config.dtype = before[1]
        model.train(before[2])


def step_size_option() -> dict:
    """Set 8192 tokens per step, if this version has that option."""
    try:
        from transformers import ContinuousBatchingConfig

        return {"continuous_batching_config": ContinuousBatchingConfig(max_batch_tokens=8192)}
    except (ImportError, TypeError) as error:
        print(f"continuous batching runs with its default step size: {error}")
        return {}


def workload_hints(work: Workload) -> dict:
    """Give the maximum lengths and the number of requests, if this version takes such hints."""
    try:
        from transformers.generation.continuous_batching.utils import WorkloadHints

        max_prompt = max(map(len, work.prompts))
        return {"workload_hints": WorkloadHints(max_prompt, max(work.new), len(work.new))}
    except (ImportError, TypeError) as error:
        print(f"continuous batching runs without workload hints: {error}")
        return {}


def run_requests(manager, prompts: list, new: list) -> None:
    """Add all requests and wait until they finish, up to TIMEOUT."""
    deadline = time.perf_counter() + TIMEOUT
    unfinished = {
        manager.add_request(ids, max_new_tokens=count, eos_token_id=-1)
        for ids, count in zip(prompts, new, strict=True)
    }
    while unfinished and time.perf_counter() < deadline:
        result = manager.get_result(timeout=1)
        if result is not None:
            assert result.error is None, f"continuous batching failed: {result.error}"
            unfinished -= {result.request_id} if result.is_finished() else set()
    for request in unfinished:
        manager.cancel_request(request)
    if unfinished:
        raise TimeoutError(
            f"{len(unfinished)} of {len(new)} requests did not finish in {TIMEOUT:.0f} s"
        )


@torch.no_grad()
def run_static(name: str, model, work: Workload, batch_size: int) -> float:
    """Time `generate` on padded batches in order of arrival; each runs to its longest request."""
    device = next(model.parameters()).device

    def generate() -> None:
        for start in range(0, len(work.prompts), batch_size):
            prompts = work.prompts[start : start + batch_size]
            new = work.new[start : start + batch_size]
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            model.generate(
                ids, attention_mask=mask.to(device), max_new_tokens=max(new), do_sample=False,
                pad_token_id=0,
            )  # fmt: skip

    seconds, _ = timed(generate)
    add_row(
        name,
        f"transformers generate, batch {batch_size}",
        seconds,
        work.new_tokens,
        requests=len(work.new),
    )
    return seconds
