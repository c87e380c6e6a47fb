"""Every front end trains and evaluates in every layout as one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run

CHILD = Path(__file__).parent / "support" / "front_end_layouts_child.py"
TWO = ["accelerate cp", "hf sp_size", "hf tp", "lightning sp", "lightning fsdp"]
"""Each front end and each layout at least once."""
TWO_MORE = [
    "accelerate sp", "accelerate sp_size", "accelerate tp", "accelerate fsdp", "hf sp", "hf cp",
    "hf fsdp", "lightning tp",
]  # fmt: skip
FOUR = [
    "hf tp_fsdp", "hf ddp", "hf hsdp", "hf sp_size", "accelerate hsdp", "accelerate ddp",
    "accelerate cp", "lightning ddp", "lightning sp", "lightning fsdp",
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, TWO),
        pytest.param(2, TWO_MORE, marks=pytest.mark.slow),
        pytest.param(4, FOUR, marks=pytest.mark.slow),
    ],
)
def test_weights_answers_and_validation_loss_are_those_of_one_rank(tmp_path, world, cases):
    tiny_run.model().save_pretrained(tmp_path / "model")
    for child in tiny_run.launch(CHILD, tmp_path, *cases, world=world):
        assert list(child) == cases
        for case, found in child.items():
            assert found["distance"] < 1e-10 and found["answers"], (case, found)
            assert found["loss"] is None or found["loss"] < 1e-10, (case, found)
