"""What bench_generation compares with: Transformers' continuous batching, and static batches."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from generation_report import note, timed
from generation_workloads import Work
from transformers import GenerationConfig


def run_continuous(name: str, model, work: Work, floor: float) -> float:
    """Transformers' continuous batching: cold, then kept warm on the same manager."""
    with continuous(model, max(work.new)) as manager:
        first, _ = timed(lambda: serve(manager, work.prompts, work.new))
        warm, _ = timed(lambda: serve(manager, work.prompts, work.new))
    note(name, "transformers continuous batching", warm, work.new_tokens, floor, cold=first)
    return warm


@contextmanager
def continuous(model, most: int):
    """A manager of continuous batching at its best: flash-attn 2, and 8192 tokens a step.

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
        options = {"generation_config": config, **large_steps()}
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


def serve(manager, prompts: list, new: list) -> None:
    """Send all requests; wait for the last."""
    for ids, count in zip(prompts, new, strict=True):
        manager.add_request(ids, max_new_tokens=count, eos_token_id=-1)
    done = 0
    while done < len(prompts):
        result = manager.get_result(timeout=120)
        assert result is not None and result.error is None, "continuous batching failed"
        done += result.is_finished()


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
