"""Model heads (causal, masked, token, document): find the kind, run it on packs, compute losses.

    causal     ForCausalLM                 the next token                     labels [1, T], shifted
    masked     ForMaskedLM                 tokens that were replaced          labels [1, T]
    token      ForTokenClassification      a class of each token              labels [1, T]
    document   ForSequenceClassification   classes or scores of each document labels [N]

A document's head pools its own tokens: hidden states of a pack are laid out as one row for each
document, and the model's own head reads them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ...attention import not_causal_lm_reason
from ...attention.hf import ImageAttention, is_encoder, position_offset
from .packed_forward import PackLayout, backbone_unpacked

Head = Literal["causal", "masked", "token", "document"]
_CLASSES: dict[str, Head] = {
    "ForMaskedLM": "masked",
    "ForTokenClassification": "token",
    "ForSequenceClassification": "document",
}


def find_head(model: Any) -> Head:
    """Return the kind of a model's head, or raise if packs cannot train it."""
    names = [base.__name__ for base in type(model).__mro__]
    kinds: list[Head] = [
        kind for end, kind in _CLASSES.items() if any(name.endswith(end) for name in names)
    ]
    kind: Head = kinds[0] if kinds else "causal"
    reason = None
    if kind == "causal":
        reason = not_causal_lm_reason(model)
    elif model.config.is_encoder_decoder:
        reason = f"{type(model).__name__} is an encoder-decoder"
    elif kind == "document" and model.base_model is model:
        reason = f"the backbone of {type(model).__name__} cannot be run without its head"
    elif kind == "document" and model.config.get_text_config().pad_token_id is None:
        raise ValueError(
            f"{type(model).__name__} finds the last token of a document by its padding: set "
            "model.config.pad_token_id to an id that documents do not end with"
        )
    if reason is not None:
        raise ValueError(
            f"{reason}: packs train causal and masked LMs, and classifiers of documents and "
            "tokens; train this model on padded batches"
        )
    return kind


def prepare_for_packs(model: Any) -> list[Any]:
    """Prepare a model for the positions and the images of packs; return what `remove` undoes.

    RoBERTa counts from `pad_token_id + 1`, packed batches from 0.
    """
    offset = position_offset(model.config.get_text_config())

    def add_offset(_: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if kwargs.get("cu_seq_lens_q") is None:
            return args, kwargs
        return args, {**kwargs, "position_ids": kwargs["position_ids"] + offset}

    hooks: list[Any] = [ImageAttention(model)]
    if offset:
        hooks.append(model.register_forward_pre_hook(add_offset, with_kwargs=True))
    return hooks


def reads_context(model: Any) -> bool:
    """Return whether attention of a model needs the forward context of packed batches.

    Encoders may drop keyword arguments, and models with another first position are refused
    without it.
    """
    config = model.config.get_text_config()
    return is_encoder(config) or position_offset(config) > 0


def run_per_document(model: Any, forward: Any, inputs: dict[str, Any]) -> Any:
    """Run a classifier on a pack; its outputs have a row for each sequence, not for each pack.

    forward: of the classifier; its backbone runs the pack.
    inputs: a packed batch, without labels.
    """
    names = ("input_ids", "position_ids", "use_cache")
    bounds = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
    pack = {name: inputs[name] for name in (*names, *bounds) if name in inputs}
    # PEFT passes attention_mask=None.
    others = {k: value for k, value in inputs.items() if k not in pack and value is not None}
    ids, cu_seq_lens = pack["input_ids"].flatten(), pack["cu_seq_lens_q"].long()
    rows, columns = len(cu_seq_lens) - 1, int(pack["max_length_q"])
    index = _padded_index(cu_seq_lens, len(ids), columns)
    padding = model.config.get_text_config().pad_token_id
    padded = ids.new_full((rows * columns,), padding).index_copy(0, index, ids)
    mask = torch.zeros_like(padded).index_fill(0, index, 1).view(rows, columns)
    mask[:, 0] = 1  # an empty sequence of fixed shapes has no token: a mean over none is NaN
    layout = PackLayout([pack], index, (rows, columns))
    with backbone_unpacked(model.base_model, lambda *_: layout):
        return forward(input_ids=padded.view(rows, columns), attention_mask=mask, **others)


def _padded_index(cu_seq_lens: Tensor, tokens: int, columns: int) -> Tensor:
    """int64 [T]: the place of each token of a pack if its sequences are rows of `columns` tokens.

    >>> _padded_index(torch.tensor([0, 2, 5]), 5, 3).tolist()
    [0, 1, 3, 4, 5]
    """
    token = torch.arange(tokens, device=cu_seq_lens.device)
    row = torch.searchsorted(cu_seq_lens[1:], token, right=True)
    return row * columns + token - cu_seq_lens[row]


def score_losses(
    model: Any, logits: Tensor, targets: Tensor, is_labelled: bool, options: dict[str, float]
) -> Tensor | None:
    """Return the loss of each document with scores or several classes; None: labels are classes.

    They are those of Transformers' `problem_type` for each document alone.

    logits: [N, classes] or [T, classes].
    is_labelled: False for a pack without documents, whose labels are ignored.
    options: of the cross-entropy, which scores do not have.
    """
    config, has_scores = model.config, targets.is_floating_point()
    problem = config.problem_type if find_head(model) == "document" else "single_label"
    if problem is None and (config.num_labels == 1 or has_scores):
        problem = "regression" if config.num_labels == 1 else "multi_label_classification"
    has_classes = problem is None or problem.startswith("single")
    if problem == "multi_label_classification" and not has_scores and is_labelled:
        raise ValueError(f"problem_type={problem!r} needs floats as labels, one for each class")
    if not is_labelled and not has_classes:
        targets = torch.zeros_like(logits)
    num_labels = len(logits) if has_classes else logits.numel()
    if targets.numel() != num_labels or (has_scores and has_classes):
        raise ValueError(
            f"labels of the shape {list(targets.shape)} for logits of {list(logits.shape)}: this "
            "head needs the labels of PackedDataset(label_column=...)"
        )
    if has_classes:
        return None
    if any(options.values()):
        raise ValueError(
            f"{options} apply to the cross-entropy of classes, not to scores: omit them"
        )
    targets = targets.view_as(logits).to(logits.dtype)
    if problem == "regression":
        return (logits - targets).square().mean(-1)
    return binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1)
