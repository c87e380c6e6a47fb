"""Log-probabilities of packed pairs are those of each answer alone, and so are their gradients."""

from __future__ import annotations

import pytest
import tiny_run
import torch
from nopad.collators import PreferenceCollator
from nopad.trainer.loss import attach_loss, preference_log_probs
from torch.nn.functional import logsigmoid

PAIRS = [
    {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10, 11, 12, 13]},
    {"prompt_ids": [14], "chosen_ids": [15, 16, 17], "rejected_ids": [18]},
]


def alone(model, pair: dict, answer: str) -> torch.Tensor:
    """The log-probability of one answer, from a row of its own."""
    prompt, ids = pair["prompt_ids"], pair[answer]
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0].float()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return logprobs[torch.arange(len(ids)), torch.tensor(ids)].sum()


def dpo_gradients(model, chosen, rejected) -> dict:
    model.zero_grad()
    (-logsigmoid(0.5 * (chosen - rejected)).mean()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("attached", [False, True])
def test_packed_pairs_equal_answers_one_by_one(attached):
    model = tiny_run.model().train()
    gold = [
        torch.stack([alone(model, pair, name) for pair in PAIRS])
        for name in ("chosen_ids", "rejected_ids")
    ]
    gold_gradients = dpo_gradients(model, *gold)
    if attached:
        attach_loss(model)
    ours = preference_log_probs(model, PreferenceCollator()(PAIRS))
    for got, want in zip(ours, gold, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert tiny_run.distance(dpo_gradients(model, *ours), gold_gradients) < 2e-6


def test_logits_are_computed_for_answers_alone(monkeypatch):
    model, seen = tiny_run.model(), []
    model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(output.shape[1])
    )
    preference_log_probs(model, PreferenceCollator()(PAIRS))
    assert seen == [sum(len(p["chosen_ids"]) + len(p["rejected_ids"]) for p in PAIRS)]


def test_a_model_that_cannot_choose_positions_gives_the_same(monkeypatch):
    model, batch = tiny_run.model(), PreferenceCollator()(PAIRS)
    expected = preference_log_probs(model, batch)

    def forward(self, input_ids=None, **kwargs):
        assert "logits_to_keep" not in kwargs
        return plain(self, input_ids=input_ids, **kwargs)

    plain = type(model).forward
    monkeypatch.setattr(type(model), "forward", forward)
    for got, want in zip(preference_log_probs(model, batch), expected, strict=True):
        torch.testing.assert_close(got, want)
