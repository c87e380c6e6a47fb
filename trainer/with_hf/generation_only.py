"""The trainer's own evaluation without an `eval_dataset`: by generation alone.

Transformers' constructor refuses an `eval_strategy` without an evaluation set; the callbacks with
evaluations by generation are added after it. So the check is made when the training starts.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainingArguments

from .evaluation import EvalCallback


def lacks_eval_set(args: TrainingArguments, eval_dataset: Any) -> bool:
    """Return whether the arguments ask for evaluations, but there is no set for them."""
    return args.eval_strategy != "no" and eval_dataset is None


def evaluates_by_generation(trainer: Trainer) -> bool:
    """Return whether an evaluation by generation joins the trainer's own."""
    callbacks = (c for c in trainer.callback_handler.callbacks if isinstance(c, EvalCallback))
    return any(e.every is None for callback in callbacks for e in callback.evaluations)


def check_has_evaluation(trainer: Trainer) -> None:
    """Refuse evaluations that would have nothing to evaluate."""
    args: Any = trainer.args
    if lacks_eval_set(args, trainer.eval_dataset) and not evaluates_by_generation(trainer):
        raise ValueError(
            f"eval_strategy={str(args.eval_strategy.value)!r} has nothing to evaluate: pass "
            "eval_dataset=, or add EvalCallback(trainer, evaluation) with a GenerationEval whose "
            "every is None"
        )


def evaluate_by_generation(trainer: Trainer) -> dict[str, float]:
    """Run the evaluations that join the trainer's own; they log their metrics themselves."""
    metrics: dict[str, float] = {}
    trainer.control = trainer.callback_handler.on_evaluate(
        trainer.args, trainer.state, trainer.control, metrics
    )
    return metrics
