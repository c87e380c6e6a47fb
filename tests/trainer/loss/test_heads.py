"""Heads beside an LM's: classes, scores and labels of tokens, packed as one by one."""

from __future__ import annotations

from copy import deepcopy

import pytest
import tiny_run
import torch
import transformers
from front_ends import FIRST_STEP
from nopad.collators import PackedCollator
from nopad.packing import PackedDataset
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring import check_run
from nopad.trainer.with_hf import PackedTrainer
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "pad_token_id": 0, "max_position_embeddings": 64}
DOCUMENT, TOKEN = "ForSequenceClassification", "ForTokenClassification"
HEADS = {
    "class": (DOCUMENT, 3, lambda ids: ids[0] % 3),
    "score": (DOCUMENT, 1, lambda ids: ids[0] / 10),
    "classes": (DOCUMENT, 3, lambda ids: [float(ids[0] % 2), 1.0, 0.0]),
    "token": (TOKEN, 3, lambda ids: [i % 4 - 1 if i % 4 else -100 for i in ids]),
}


def rows(head: str, count: int = 20) -> list[dict]:
    label = HEADS[head][2]
    return [{"input_ids": row["input_ids"], "label": label(row["input_ids"])}
            for row in tiny_run.samples(count)]  # fmt: skip


def classifier(head: str, family: str = "Llama", attention: str = "nopad", **settings):
    torch.manual_seed(0)
    kind = getattr(transformers, family + HEADS[head][0])
    config = kind.config_class(**SIZES, num_labels=HEADS[head][1], **settings)
    config._attn_implementation = attention
    return kind(config).eval()


def one_by_one(model, documents: list[dict]) -> tuple[float, dict[str, torch.Tensor]]:
    """The model's own loss of each document, weighted by its labels, and the gradient."""
    losses, counts = [], []
    for row in documents:
        ids, label = torch.tensor([row["input_ids"]]), torch.tensor([row["label"]])
        counts.append(int((label != -100).sum()) if label.dtype == torch.int64 else 1)
        if counts[-1]:
            losses.append(model(input_ids=ids, labels=label).loss * counts[-1])
    loss = torch.stack(losses).sum() / sum(counts)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma3Text"])
@pytest.mark.parametrize("head", HEADS)
def test_a_head_on_a_pack_learns_what_it_learns_from_documents_one_by_one(head, family):
    if not hasattr(transformers, family + HEADS[head][0]):
        pytest.skip(reason=f"Transformers has no {family + HEADS[head][0]}")
    model, documents = classifier(head, family), rows(head)
    loss, gradient = one_by_one(deepcopy(model), documents)
    attach_loss(model)
    out = model(**PackedCollator()(documents))
    out.loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert out.loss.item() == pytest.approx(loss, rel=1e-5)
    assert tiny_run.distance(ours, gradient) < 1e-5
    tokens = sum(len(row["input_ids"]) for row in documents)
    assert out.logits.shape[:-1] == ((1, tokens) if head == "token" else (len(documents),))


@pytest.mark.parametrize(("head", "task"), [("class", "SEQ_CLS"), ("token", "TOKEN_CLS")])
def test_adapters_of_a_classifier_learn_from_a_pack_as_from_documents(head, task):
    config = LoraConfig(task_type=task, target_modules=["q_proj"], init_lora_weights=False)
    model, documents = get_peft_model(classifier(head), config), rows(head)
    gold = deepcopy(model)
    one_by_one(gold, documents)
    attach_loss(model)
    model(**PackedCollator()(documents)).loss.backward()
    gradients = (
        {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
        for m in (model, gold)
    )
    assert tiny_run.distance(*gradients) < 1e-5


@pytest.mark.parametrize("front_end", FIRST_STEP)
@pytest.mark.parametrize("head", ["class", "token"])
def test_a_step_of_every_front_end_is_that_of_its_documents(front_end, head, tmp_path):
    model = classifier(head, attention="nopad", classifier_dropout=0.0)
    data = PackedDataset(rows(head), budget=64, seed=3, label_column="label")
    packs = [pack for pack, _ in zip(data, range(2), strict=False)]
    documents = [
        {"input_ids": pack.tokens[a:b].tolist(), "label": label if head == "class" else list(label)}
        for pack in packs
        for a, b, label in zip(pack.cu_seqlens, pack.cu_seqlens[1:], pack.targets, strict=False)
    ]
    _, gold = one_by_one(deepcopy(model), documents)
    data.rewind()
    ours = FIRST_STEP[front_end](model, data, tmp_path)
    assert tiny_run.distance(ours, gold) < 1e-5


@pytest.mark.parametrize("attention", ["nopad", "sdpa"])
def test_fixed_shapes_and_rows_of_several_packs_give_the_same_loss(attention):
    model, documents = classifier("class", attention=attention), rows("class")
    attach_loss(model)
    expected = model(**PackedCollator()(documents)).loss
    data = PackedDataset(documents, budget=64, label_column="label")
    for options in ({"pad_to_budget": True}, {"fixed_sequences": 64}):
        batch = PackedCollator(**options)(list(data))
        assert torch.allclose(model(**batch).loss, expected, rtol=1e-5), options


def test_pooling_over_two_documents_is_refused_at_the_start():
    data = PackedDataset(rows("class"), budget=64, label_column="label")
    model = classifier("class")
    attach_loss(model)
    check_run(model, data)
    model.score.register_forward_pre_hook(lambda _, args: (args[0] + args[0].mean((0, 1)),))
    with pytest.raises(ValueError, match="lets packed samples see each other"):
        check_run(model, data)


def test_labels_that_the_head_does_not_learn_are_refused():
    labelled = PackedDataset(rows("class"), budget=64, label_column="label")
    plain = tiny_run.dataset()
    for model, data, told in (
        (classifier("class"), plain, r"learns the label of each document.*label_column="),
        (tiny_run.model(), labelled, "has labels of documents, but LlamaForCausalLM predicts"),
    ):
        attach_loss(model)
        with pytest.raises(ValueError, match=told):
            check_run(model, data)
    model = classifier("class")
    attach_loss(model)
    with pytest.raises(ValueError, match=r"labels of the shape \[1, 5\] for logits of \[1, 3\]"):
        model(**PackedCollator()([{"input_ids": [5, 6, 7, 8, 9]}]))
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match="needs floats as labels"):
        model(**PackedCollator()(rows("class")))


def test_a_classifier_without_padding_says_how_to_get_one():
    model = classifier("class")
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match=r"set model\.config\.pad_token_id"):
        attach_loss(model)


def test_a_class_that_the_model_lacks_is_named_before_it_is_trained(tmp_path):
    documents = [{**row, "label": 7} for row in rows("class")]
    data = PackedDataset(documents, budget=64, label_column="label")
    with pytest.raises(ValueError, match="label 7 is outside the model's 3 classes"):
        FIRST_STEP["hf"](classifier("class"), data, tmp_path)


def test_predictions_are_in_the_order_of_the_rows(tmp_path):
    documents = rows("class", 30)
    model = classifier("class")
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in documents]
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
    data = PackedDataset(documents, budget=64, label_column="label")
    found = PackedTrainer(model, args, None, data).predict(documents)
    assert found.label_ids.tolist() == [row["label"] for row in documents]
    torch.testing.assert_close(torch.from_numpy(found.predictions), torch.stack(alone))
    trainer = PackedTrainer(model, args, PackedCollator(pad_to_budget=True), data)
    with pytest.raises(ValueError, match="rows for the padding of fixed shapes"):
        trainer.predict(documents)


def test_documents_of_a_token_classifier_weigh_the_same_if_asked():
    model, documents = classifier("token", classifier_dropout=0.0), rows("token", 6)
    attach_loss(model)
    alone = [model(**PackedCollator()([row])).loss.item() for row in documents]
    batch = PackedCollator(mean="sample")(documents)
    assert model(**batch).loss.item() == pytest.approx(sum(alone) / len(alone), rel=1e-5)


def test_label_smoothing_of_scores_is_refused():
    model = classifier("score")
    attach_loss(model, label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"'label_smoothing': 0\.1.* not to scores"):
        model(**PackedCollator()(rows("score")))
