"""A harness that scores a model with broken weights raises instead of giving it points."""

from __future__ import annotations

import lm_tasks
import pytest
import torch
from nopad.inference.harness import Harness
from nopad.trainer.evaluation import GenerationEval
from small_checkpoint import random_model, small_tokenizer


def test_weights_that_are_not_numbers_get_no_score(tmp_path):
    """The log-likelihood of every choice is NaN, and the largest of them would be the first."""
    tokenizer = small_tokenizer()
    model = random_model(tokenizer)
    names = lm_tasks.write_tasks(tmp_path, 8)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    for name in names:
        harness = Harness(model, tokenizer, [name], limit=3, include_path=str(tmp_path))
        with pytest.raises(ValueError, match="logits are not numbers"):
            harness()
        report = GenerationEval(harness, every=1).run(1, model)
        assert "logits are not numbers" in report.error
        assert set(report.metrics) == {"eval/seconds", "eval/share_of_time"}
