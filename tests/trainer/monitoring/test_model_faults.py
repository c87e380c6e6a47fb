"""What goes wrong in packs of hybrids, classifiers and images stops a run in every front end."""

from __future__ import annotations

import pytest
import tiny_run
import tiny_vlm
import torch
from front_ends import FIRST_STEP_OF_LM
from nopad.cli.tiny_model import randomize_weights, tiny_model
from nopad.collators import media_inputs
from nopad.packing import PackedDataset
from nopad.trainer.loss import attached_loss, document_boundaries
from transformers import LlamaConfig, LlamaForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def hybrid(kind: str):
    torch.manual_seed(0)
    model, _ = tiny_model(CONFIG_MAPPING[kind](), every_kind=True, attn_implementation="nopad")
    randomize_weights(model)
    return model.train(), tiny_run.dataset()


def state(monkeypatch):
    """The recurrent states of Jamba pass from document to document; its convolutions do not."""
    by_document = document_boundaries.convolve_by_document
    monkeypatch.setattr(document_boundaries, "run_by_document", by_document)
    return hybrid("jamba")


def convolution(monkeypatch):
    """The convolutions of LFM2 look back over boundaries."""
    monkeypatch.setattr(document_boundaries, "stateful_modules", lambda model: [])
    return hybrid("lfm2")


def grid(monkeypatch):
    """An image has the rows and columns of its neighbour."""
    right = media_inputs.concatenate
    monkeypatch.setattr(
        media_inputs,
        "concatenate",
        lambda name, inputs: right(name, inputs[::-1] if name == "image_grid_thw" else inputs),
    )
    settings = {"tokenizer": tiny_vlm.processor(), "budget": 256, "seed": 3}
    return tiny_vlm.model(), PackedDataset(tiny_vlm.chats(), **settings)


def pooling(monkeypatch):
    """A classifier pools a document with its neighbour."""
    right = attached_loss.run_per_document

    def with_neighbour(*args):
        outputs = right(*args)
        outputs.logits = outputs.logits + outputs.logits.roll(1, 0)
        return outputs

    monkeypatch.setattr(attached_loss, "run_per_document", with_neighbour)
    sizes = {"vocab_size": tiny_run.VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
             "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}  # fmt: skip
    rows = [{"input_ids": row["input_ids"], "label": 1} for row in tiny_run.samples()]
    config = LlamaConfig(**sizes, num_labels=3, attn_implementation="nopad")
    model = LlamaForSequenceClassification(config)
    return model, PackedDataset(rows, budget=tiny_run.BUDGET, label_column="label")


FAULTS = {fault.__name__: fault for fault in (state, convolution, grid, pooling)}
CASES = [(fault, front_end) for fault in FAULTS for front_end in FIRST_STEP_OF_LM]
CASES.remove(("pooling", "trl"))


@pytest.mark.parametrize(("fault", "front_end"), CASES)
def test_a_model_that_packs_would_train_wrongly_is_refused(fault, front_end, tmp_path, monkeypatch):
    model, data = FAULTS[fault](monkeypatch)
    with pytest.raises(ValueError, match=r"lets packed samples see each other|differently than"):
        FIRST_STEP_OF_LM[front_end](model, data, tmp_path)
