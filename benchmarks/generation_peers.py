"""What bench_generation compares with: Transformers' continuous batching, and static batches."""

from __future__ import annotations

import torch
from generation_report import note, timed
from generation_workloads import Work
from transformers import GenerationConfig


def run_continuous(name: str, model, work: Work, floor: float) -> float:
    """Transformers' continuous batching: cold, then kept warm on the same manager."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("flash_attention_2")
    except Exception as error:
        print(f"{name:8} continuous batching without flash-attn 2: {type(error).__name__}")
    try:
        first, warm = _twice(model, work)
    finally:
        model.set_attn_implementation(before)
    note(name, "transformers continuous batching", warm, work.new_tokens, floor, cold=first)
    return warm


def _twice(model, work: Work) -> tuple[float, float]:
    """Seconds of all requests on a new manager, and once more on the same."""
    config = GenerationConfig(do_sample=False, max_new_tokens=max(work.new), eos_token_id=-1)

    def serve(manager) -> None:
        for prompt, new in zip(work.prompts, work.new, strict=True):
            manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1)
        done = 0
        while done < len(work.prompts):
            result = manager.get_result(timeout=60)
            assert result is not None and result.error is None, "continuous batching failed"
            done += result.is_finished()

    with model.continuous_batching_context_manager(generation_config=config) as manager:
        first, _ = timed(lambda: serve(manager))
        return first, timed(lambda: serve(manager))[0]


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
