"""Does generation compute what training computes? The same tokens, through both.

    prompts ─▶ generate: tokens, and their log-probabilities as the engine saw them ─┐
                            │                                                        ├─▶ difference
                            └─▶ one packed forward, as in training ──────────────────┘

On-policy methods divide one by the other; an evaluation trusts that they are the same. In exact
arithmetic they are. What is left is rounding: other shapes of the same products.
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
    """How far log-probabilities of the same tokens lie apart."""

    tokens: int
    mean: float
    """Mean absolute difference."""
    largest: float
    dtype: str
    """What both computed in."""
    device: str

    def __str__(self) -> str:
        return (
            f"train-inference agreement over {self.tokens} tokens ({self.dtype}, {self.device}): "
            f"mean difference {self.mean:.3g}, largest {self.largest:.3g}"
        )


class LogprobParityEval:
    """The comparison as an evaluation: called now and then, it gives metrics.

    GenerationEval(LogprobParityEval(model, engine, prompts), every=1000, name="agreement")
    """

    def __init__(self, model: Any, engine: Engine, prompts: Sequence[Sequence[int]], new: int = 32):
        self._asked = (model, engine, prompts, new)

    def __call__(self, deadline: float | None = None) -> dict[str, float]:
        """Generate and compare; it is short, and knows no deadline."""
        found = agreement(*self._asked)
        return {"mean": found.mean, "largest": found.largest, "tokens": float(found.tokens)}


def agreement(
    model: Any,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new: int = 32,
    temperature: float = 1.0,
    attention: str | None = None,
) -> LogprobParity:
    """Compare the engine's log-probabilities of its own tokens with a packed training forward's.

    Both compute under the autocast that is on around the call.

    attention: the backend that generation must use; None: the best there is.
    """
    params = SamplingParams(temperature=temperature, max_tokens=new, logprobs=0, ignore_eos=True)
    with force_paged_backend(attention):
        made = engine.generate(prompts, params)
    for number, completion in enumerate(made):
        if completion.error is not None:
            raise ValueError(f"prompt {number}: {completion.error}")
    model = unwrap_model(model)
    parameter = next(model.parameters())
    kind = parameter.device.type
    narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with borrow_model(model, narrow):
        trained = packed_logprobs(model, prompts, made)
    reported = [t.logprob for c in made for t in c.logprobs or ()]
    seen = torch.tensor(reported, dtype=torch.float64)
    apart = (seen - trained.double().cpu()).abs()
    dtype = str(narrow or parameter.dtype).removeprefix("torch.")
    return LogprobParity(len(apart), float(apart.mean()), float(apart.max()), dtype, kind)


def packed_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], made: Sequence[Completion]
) -> Tensor:
    """Log-probabilities of all completions' tokens, from one forward over all sequences packed."""
    device = next(model.parameters()).device
    whole = [[*map(int, p), *c.tokens] for p, c in zip(prompts, made, strict=True)]
    batch = packed_batch([torch.tensor([ids], device=device) for ids in whole])
    logits = model(**batch).logits[0]
    ends = batch["cu_seq_lens_q"][1:].tolist()
    found = []
    for end, completion in zip(ends, made, strict=True):
        new = len(completion.tokens)
        rows = logits[end - new - 1 : end - 1].float()
        targets = torch.tensor(completion.tokens, device=device)
        found.append(rows.gather(1, targets[:, None])[:, 0] - rows.logsumexp(-1))
    return torch.cat(found)
