"""TRL's own metrics, which it computes from logits: here from the hidden states of logged steps.

`mean_token_accuracy` and `entropy` cost another product with the LM head. In training they are
those of the steps that are logged, where TRL averages over the steps in between; evaluations
measure every batch. They are means over tokens, where TRL averages the means of batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..loss.attached_loss import AttachedLoss


@contextmanager
def trl_metrics(trainer: Any, loss: AttachedLoss) -> Iterator[None]:
    """Measure the batch of the block for TRL's log; nothing in other trainers."""
    metrics = getattr(trainer, "_metrics", None)
    if not isinstance(metrics, dict) or "train" not in metrics:
        yield
        return
    mode = "train" if trainer.model.training else "eval"
    loss.measures_tokens = mode == "eval" or _is_logged(trainer)
    try:
        yield
        if loss.measures_tokens and loss.token_statistics is not None:
            sums = trainer.accelerator.reduce(loss.token_statistics, "sum").tolist()
            if "mean_token_accuracy" in metrics[mode]:  # not logged since
                sums = [a + b for a, b in zip(sums, trainer.token_sums[mode], strict=True)]
            trainer.token_sums[mode] = sums
            _set_means(metrics[mode], *sums)
    finally:
        loss.measures_tokens, loss.token_statistics = False, None


def _set_means(metrics: dict[str, list[float]], right: float, entropy: float, labels: float):
    if labels:
        metrics["mean_token_accuracy"] = [right / labels]
        metrics["entropy"] = [entropy / labels]


@contextmanager
def metrics_kept(trainer: Any, mode: str) -> Iterator[None]:
    """Keep TRL's metrics of "train" or "eval" for their own log line; nothing in other trainers.

    TRL adds those of a mode to whatever is logged next while the model is in it.
    """
    metrics = getattr(trainer, "_metrics", None)
    if not isinstance(metrics, dict) or "train" not in metrics:
        yield
        return
    kept, metrics[mode] = metrics[mode], defaultdict(list)
    try:
        yield
    finally:
        metrics[mode] = kept


def count_trl_tokens(trainer: Any, tokens: float) -> None:
    """Have TRL log the tokens seen so far."""
    metrics = getattr(trainer, "_metrics", None)
    if isinstance(metrics, dict) and "train" in metrics:
        metrics["train"]["num_tokens"] = [tokens]


def _is_logged(trainer: Any) -> bool:
    """Return whether the log shows the current step."""
    step, args = trainer.state.global_step + 1, trainer.args
    if args.logging_strategy != "steps":
        return trainer._epochs.ends_epoch() or step == trainer.state.max_steps
    is_first = step == 1 and args.logging_first_step
    return is_first or step % trainer.state.logging_steps == 0 or step == trainer.state.max_steps
