"""Encoders on packs: masked LMs and heads learn what they learn from documents one by one."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
import tiny_run
import torch
import transformers
from front_ends import FIRST_STEP
from nopad.collators import MaskedCollator, PackedCollator
from nopad.packing import Pack, PackedDataset, Sample
from nopad.trainer.loss import attach_loss, document_embeddings
from nopad.trainer.monitoring import check_run

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "num_labels": 3}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0}
DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "dropout": 0.0}
DISTIL |= {"vocab_size": 61, "max_position_embeddings": 64, "num_labels": 3, "pad_token_id": 0}
MODERN = {**SIZES, **SPECIAL, "local_attention": 6, "sep_token_id": 2}
FAMILIES = {
    "Bert": {**SIZES, **NO_DROPOUT},
    "Roberta": {**SIZES, **NO_DROPOUT},
    "XLMRoberta": {**SIZES, **NO_DROPOUT},
    "Camembert": {**SIZES, **NO_DROPOUT},
    "ModernBert": MODERN,
    "DistilBert": {**DISTIL, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "Electra": {**SIZES, **NO_DROPOUT, "embedding_size": 32},
    "Albert": {**SIZES, **NO_DROPOUT, "embedding_size": 32},
    "Ernie": {**SIZES, **NO_DROPOUT},
    "EuroBert": {**SIZES, **SPECIAL, "num_key_value_heads": 4},
}


class Tokenizer:
    mask_token_id, all_special_ids = 4, (0, 1, 2, 3, 4)

    def __len__(self) -> int:
        return 61


TOKENIZER = Tokenizer()


def encoder(family: str, head: str, attention: str = "nopad", **settings):
    torch.manual_seed(0)
    kind = getattr(transformers, family + head)
    config = kind.config_class(**{**FAMILIES[family], **settings})
    model = kind._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def documents(head: str) -> list[dict]:
    rows = [row["input_ids"] for row in tiny_run.samples(12)]
    rows = [[token if token > 4 else 5 for token in ids] for ids in rows]
    if head == "ForSequenceClassification":
        return [{"input_ids": ids, "label": ids[0] % 3} for ids in rows]
    return [{"input_ids": ids, "label": [t % 3 if t % 2 else -100 for t in ids]} for ids in rows]


def one_by_one(model, rows: list[dict]) -> tuple[float, dict[str, torch.Tensor]]:
    losses, counts = [], []
    for row in rows:
        ids, label = torch.tensor([row["input_ids"]]), torch.tensor([row["label"]])
        counts.append(int((label != -100).sum()))
        if counts[-1]:
            losses.append(model(input_ids=ids, labels=label).loss * counts[-1])
    loss = torch.stack(losses).sum() / sum(counts)
    loss.backward()
    named = model.named_parameters()
    return loss.item(), {name: p.grad for name, p in named if p.grad is not None}


def cut(batch: dict) -> list[dict]:
    """The documents of a packed batch with labels of tokens."""
    bounds = batch["cu_seq_lens_q"].tolist()
    return [
        {name: batch[key][0, a:b].tolist() for name, key in
         (("input_ids", "input_ids"), ("label", "labels"))}
        for a, b in pairwise(bounds)
    ]  # fmt: skip


HEADS = ["ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", HEADS)
def test_an_encoder_learns_from_a_pack_what_it_learns_one_by_one(family, head):
    model, rows = encoder(family, head), documents(head)
    batch = PackedCollator()(rows)
    if head == "ForMaskedLM":
        plain = [{"input_ids": row["input_ids"]} for row in rows]
        batch = MaskedCollator(TOKENIZER, probability=0.5)(plain)
        rows = cut(batch)
    stock = deepcopy(model)
    stock.set_attn_implementation("eager")
    loss, gradient = one_by_one(stock, rows)
    attach_loss(model)
    ours = model(**batch).loss
    ours.backward()
    assert ours.item() == pytest.approx(loss, rel=1e-5)
    found = {n: p.grad for n, p in model.named_parameters() if n in gradient}
    assert tiny_run.distance(found, gradient) < 2e-5


@pytest.mark.parametrize("front_end", FIRST_STEP)
@pytest.mark.parametrize("family", ["Roberta", "ModernBert"])
def test_a_step_of_every_front_end_is_that_of_its_documents(front_end, family, tmp_path):
    model, collator = encoder(family, "ForMaskedLM"), MaskedCollator(TOKENIZER, seed=1)
    plain = [{"input_ids": row["input_ids"]} for row in documents("")]
    data = PackedDataset(plain, budget=64, seed=3, vocab_size=61)
    packs = [pack for pack, _ in zip(data, range(2), strict=False)]
    rows = [row for pack in packs for row in cut(collator(pack))]
    stock = deepcopy(model)
    stock.set_attn_implementation("eager")
    _, gold = one_by_one(stock, rows)
    data.rewind()
    ours = FIRST_STEP[front_end](model, data, tmp_path, collator=collator)
    assert tiny_run.distance({name: ours[name] for name in gold}, gold) < 2e-5


@pytest.mark.parametrize("family", ["Bert", "Roberta", "ModernBert"])
def test_the_start_check_passes_encoders_and_catches_a_pack_without_boundaries(family):
    plain = [{"input_ids": row["input_ids"]} for row in documents("")]
    data, collator = PackedDataset(plain, budget=64), MaskedCollator(TOKENIZER)
    model = encoder(family, "ForMaskedLM")
    attach_loss(model)
    banner = check_run(model, data, collator)
    assert "leak check 0.0" in banner[0]

    def as_one_document(_, args, kwargs):
        whole = kwargs["cu_seq_lens_q"][[0, -1]]
        tokens = kwargs["input_ids"].shape[1]
        return args, {**kwargs, "cu_seq_lens_q": whole, "max_length_q": tokens}

    model.register_forward_pre_hook(as_one_document, with_kwargs=True)
    with pytest.raises(ValueError, match="lets packed samples see each other"):
        check_run(model, data, collator)


def test_masked_lms_and_their_collator_belong_together():
    data = PackedDataset([{"input_ids": row["input_ids"]} for row in documents("")], budget=64)
    masked, causal = encoder("Bert", "ForMaskedLM"), tiny_run.model()
    for model, collator, told in (
        (masked, None, r"BertForMaskedLM predicts masked tokens: collate with MaskedCollator"),
        (causal, MaskedCollator(TOKENIZER), "predicts no masked tokens: omit MaskedCollator"),
    ):
        attach_loss(model)
        with pytest.raises(ValueError, match=told):
            check_run(model, data, collator)


def test_stock_attention_of_an_encoder_is_refused_with_the_way_out():
    data = PackedDataset([{"input_ids": row["input_ids"]} for row in documents("")], budget=48)
    model = encoder("Bert", "ForMaskedLM", attention="sdpa")
    attach_loss(model)
    with pytest.raises(ValueError, match=r'see each other.*use attn_implementation="nopad"'):
        check_run(model, data, MaskedCollator(TOKENIZER))


def test_roberta_without_the_loss_that_shifts_its_positions_is_refused():
    model = encoder("Roberta", "ForMaskedLM")
    batch = PackedCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    del batch["labels"]
    with pytest.raises(ValueError, match=r"counts its positions from pad_token_id \+ 1"):
        model(**batch)
    loss = attach_loss(model)
    model(**batch)
    loss.detach()
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "ModernBert", "Llama"])
def test_embeddings_of_a_pack_are_those_of_its_documents_alone(family, pooling):
    model = tiny_run.model().model if family == "Llama" else encoder(family, "Model")
    model.eval()
    rows = [row["input_ids"] for row in documents("")]
    stock = deepcopy(model)
    stock.set_attn_implementation("eager")
    alone = [stock(torch.tensor([ids])).last_hidden_state[0] for ids in rows]
    pooled = {"mean": lambda h: h.mean(0), "first": lambda h: h[0], "last": lambda h: h[-1]}
    expected = torch.stack([pooled[pooling](hidden) for hidden in alone])
    found = document_embeddings(model, PackedCollator()([{"input_ids": r} for r in rows]), pooling)
    assert torch.allclose(found, expected, atol=1e-5)
    pack = Pack.of([Sample(np.array(ids)) for ids in rows], budget=sum(map(len, rows)))
    fixed = PackedCollator(fixed_sequences=len(rows) + 1)(pack)  # an empty sequence at the end
    assert torch.allclose(document_embeddings(model, fixed, pooling)[: len(rows)], found)
    weights = torch.randn(found.shape)
    for out in (found, expected):
        (out * weights).sum().backward()
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None}
                 for m in (model, stock)]  # fmt: skip
    assert tiny_run.distance(*gradients) < 2e-5
    stock.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="would see each other with 'sdpa'"):
        document_embeddings(stock, PackedCollator()([{"input_ids": rows[0]}]), pooling)
