"""What bench_generation compares with: Transformers' continuous batching, and static batches."""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch
from generation_report import note
from generation_workloads import Work
from record import timed
from transformers import GenerationConfig

PATIENCE = 25.0
"""Seconds after which requests that continuous batching has not finished are cancelled."""


def run_continuous(name: str, model, work: Work, floor: float) -> tuple[float, float, float]:
    """Transformers' continuous batching: seconds of a plain call, its run alone, and kept warm.

    A plain call is what `generate_batch` does: make a manager, serve, and stop it.
    """
    torch.cuda.synchronize()
    began = time.perf_counter()
    with continuous(model, max(work.new), work) as manager:
        opened = time.perf_counter() - began
        first, _ = timed(lambda: serve(manager, work.prompts, work.new))
        warm, _ = timed(lambda: serve(manager, work.prompts, work.new))
    note(
        name, "transformers continuous batching", warm, work.new_tokens, floor,
        plain_call=opened + first, making_its_manager=opened, requests=len(work.new),
    )  # fmt: skip
    return opened + first, first, warm


@contextmanager
def continuous(model, most: int, work: Work | None = None):
    """A manager of continuous batching at its best: flash-attn 2, and 8192 tokens a step.

    It is told how long the requests of `work` are, as `generate_batch` tells it.

    The model is afterwards as it was before, whatever happens inside.
    """
    config = GenerationConfig(do_sample=False, max_new_tokens=most, eos_token_id=-1)
    before = model.config._attn_implementation, model.config.dtype, model.training
    try:
        try:
            model.set_attn_implementation("flash_attention_2")
        except Exception as error:
            print(f"continuous batching without flash-attn 2: {type(error).__name__}")
        model.config.dtype = next(model.parameters()).dtype
        model.eval()
        options = {"generation_config": config, "timeout": 10.0, **large_steps()}
        if work is not None:
            options |= hints(work)
        with model.continuous_batching_context_manager(**options) as manager:
            yield manager
    finally:
        model.set_attn_implementation(before[0])
        model.config.dtype = before[1]
        model.train(before[2])


def large_steps() -> dict:
    """Let continuous batching run 8192 tokens a step, where this version can be told to."""
    try:
        from transformers import ContinuousBatchingConfig

        return {"continuous_batching_config": ContinuousBatchingConfig(max_batch_tokens=8192)}
    except (ImportError, TypeError) as error:
        print(f"continuous batching with its own step size: {error}")
        return {}


def hints(work: Work) -> dict:
    """What continuous batching can be told of the requests to come, where it takes such hints."""
    try:
        from transformers.generation.continuous_batching.utils import WorkloadHints

        longest = max(map(len, work.prompts))
        return {"workload_hints": WorkloadHints(longest, max(work.new), len(work.new))}
    except (ImportError, TypeError) as error:
        print(f"continuous batching without hints: {error}")
        return {}


def serve(manager, prompts: list, new: list) -> None:
    """Send all requests; wait for the last, but not for ever."""
    until = time.perf_counter() + PATIENCE
    waiting = {
        manager.add_request(ids, max_new_tokens=count, eos_token_id=-1)
        for ids, count in zip(prompts, new, strict=True)
    }
    while waiting and time.perf_counter() < until:
        result = manager.get_result(timeout=1)
        if result is not None:
            assert result.error is None, f"continuous batching failed: {result.error}"
            waiting -= {result.request_id} if result.is_finished() else set()
    for request in waiting:
        manager.cancel_request(request)
    if waiting:
        raise TimeoutError(f"{len(waiting)} of {len(new)} requests not done in {PATIENCE:.0f} s")


@torch.no_grad()
def run_static(name: str, model, work: Work, batch: int) -> float:
    """Transformers' generate on padded batches, in order of arrival; each runs to its longest."""
    device = next(model.parameters()).device

    def go() -> None:
        for start in range(0, len(work.prompts), batch):
            prompts, new = work.prompts[start : start + batch], work.new[start : start + batch]
            wide = max(map(len, prompts))
            ids = torch.tensor([[0] * (wide - len(p)) + p for p in prompts], device=device)
            mask = torch.tensor([[0] * (wide - len(p)) + [1] * len(p) for p in prompts])
            model.generate(
                ids, attention_mask=mask.to(device), max_new_tokens=max(new), do_sample=False,
                pad_token_id=0,
            )  # fmt: skip

    seconds, _ = timed(go)
    note(
        name,
        f"transformers generate, batch {batch}",
        seconds,
        work.new_tokens,
        requests=len(work.new),
    )
    return seconds
