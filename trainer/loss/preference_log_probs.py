"""Log-probabilities of packed preference pairs, with gradients, for DPO and its relatives.

labels of the answers ─▶ their positions ─▶ logits there only ─▶ log-probabilities ─▶ sums
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from ...collators import sequence_log_probs
from ...packing import IGNORE_INDEX
from ...runtime import unwrap_model


def preference_log_probs(model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the chosen and of the rejected answers, [pairs] each.

    They have gradients, and logits are computed only for the tokens of answers.

        chosen, rejected = preference_log_probs(model, batch)
        with torch.no_grad():
            reference = preference_log_probs(reference_model, batch)
        margins = (chosen - reference[0]) - (rejected - reference[1])
        loss = -torch.nn.functional.logsigmoid(0.1 * margins).mean()

    Args:
        model: a causal LM, with adapters or without, that isolates documents, preferably with
            `attn_implementation="nopad"`.
        batch: a batch of `PreferenceCollator`, on the model's device.
    """
    not_inputs = ("labels", "loss_weights", "is_chosen")
    inputs = {name: x for name, x in batch.items() if name not in not_inputs}
    labels = batch["labels"]
    (positions,) = (labels[0, 1:] != IGNORE_INDEX).nonzero(as_tuple=True)
    if "logits_to_keep" in signature(type(unwrap_model(model)).forward).parameters:
        logits = model(**inputs, logits_to_keep=positions).logits[0]
    else:
        logits = model(**inputs).logits[0, positions]
    losses = cross_entropy(logits.float(), labels[0, positions + 1], reduction="none")
    token_losses = losses.new_zeros(labels.shape[1]).index_put((positions + 1,), losses)
    sums = sequence_log_probs(token_losses[None], labels, batch["cu_seq_lens_q"])
    return sums[::2], sums[1::2]
