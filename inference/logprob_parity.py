"""`compare_logprobs`: the engine's log-probabilities of its tokens against the training forward's.

    prompts ─▶ generate: tokens, and their log-probabilities in the engine ─┐
                            │                                               ├─▶ difference
                            └─▶ one packed forward, as in training ─────────┘

On-policy methods divide one by the other, and evaluations rely on them being equal. In exact
arithmetic they are; the difference is rounding, since the same products have other shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.backends import force_paged_backend
from ..attention.hf import packed_batch
from ..runtime import unwrap_model
from .engine import Engine
from .live_model.borrow import borrow_model
from .requests.outputs import Completion
from .requests.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class LogprobParity:
    """Absolute differences between the engine's and training's log-probabilities."""

    num_tokens: int
    """Tokens that were compared."""
    mean: float
    """Mean difference."""
    max: float
    """Largest difference."""
    dtype: str
    """The dtype both computed in."""
    device: str
    """The type of the device, such as "cuda"."""

    def __str__(self) -> str:
        return (
            f"train-inference parity over {self.num_tokens} tokens ({self.dtype}, {self.device}): "
            f"mean difference {self.mean:.3g}, max {self.max:.3g}"
        )


class LogprobParityEval:
    """`compare_logprobs` as an evaluation during training.

    `GenerationEval(LogprobParityEval(model, engine, prompts), every=1000, name="parity")`

    Args:
        model: the model in training.
        engine: an engine on this model.
        prompts: token ids of each prompt.
        max_tokens: new tokens per prompt.
    """

    def __init__(
        self, model: Any, engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = 32
    ):
        self._model, self._engine = model, engine
        self._prompts, self._max_tokens = prompts, max_tokens

    def __call__(self, deadline: float | None = None) -> dict[str, float]:
        """Generate and compare; the deadline is ignored, since it takes a moment."""
        parity = compare_logprobs(self._model, self._engine, self._prompts, self._max_tokens)
        return {"mean": parity.mean, "max": parity.max, "tokens": float(parity.num_tokens)}


def compare_logprobs(
    model: Any,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 32,
    temperature: float = 1.0,
    backend: str | None = None,
) -> LogprobParity:
    """Compare the engine's log-probabilities of its own tokens with a packed training forward's.

    Both compute under the autocast that is active around the call.

    Args:
        model: the model in training.
        engine: an engine on this model.
        prompts: token ids of each prompt.
        max_tokens: new tokens per prompt.
        temperature: of the sampled tokens; 0 takes the most likely ones.
        backend: the attention backend of the generation; by default the preferred one.
    """
    if not len(prompts):
        raise ValueError("prompts is empty; pass at least one")
    params = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, logprobs=0, ignore_eos=True
    )
    with force_paged_backend(backend):
        completions = engine.generate(prompts, params)
    for index, completion in enumerate(completions):
        if completion.error is not None:
            raise ValueError(f"prompt {index}: {completion.error}")
    model = unwrap_model(model)
    parameter = next(model.parameters())
    device_type = parameter.device.type
    autocast = None
    if torch.is_autocast_enabled(device_type):
        autocast = torch.get_autocast_dtype(device_type)
    with borrow_model(model, autocast):
        from_training = packed_logprobs(model, prompts, completions)
    from_engine = [t.logprob for c in completions for t in c.logprobs or ()]
    difference = torch.tensor(from_engine, dtype=torch.float64) - from_training.double().cpu()
    difference = difference.abs()
    dtype = str(autocast or parameter.dtype).removeprefix("torch.")
    mean, largest = float(difference.mean()), float(difference.max())
    return LogprobParity(len(difference), mean, largest, dtype, device_type)


def packed_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> Tensor:
    """Return the log-probabilities of all completions' tokens from one packed forward."""
    device = next(model.parameters()).device
    sequences = [[*map(int, p), *c.token_ids] for p, c in zip(prompts, completions, strict=True)]
    batch = packed_batch([torch.tensor([ids], device=device) for ids in sequences])
    logits = model(**batch).logits[0]
    ends = batch["cu_seq_lens_q"][1:].tolist()
    logprobs = []
    for end, completion in zip(ends, completions, strict=True):
        count = len(completion.token_ids)
        logit_rows = logits[end - count - 1 : end - 1].float()
        targets = torch.tensor(completion.token_ids, device=device)
        logprobs.append(logit_rows.gather(1, targets[:, None])[:, 0] - logit_rows.logsumexp(-1))
    return torch.cat(logprobs)
