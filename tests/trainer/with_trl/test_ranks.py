"""TRL's trainers on two CPU ranks: those of one rank with the same batch, and TRL's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_run
import torch

pytest.importorskip("trl", reason="the trainers are TRL's")
import trl_child

SHORT = [["grpo", "one", {"max_steps": 2, "num_generations": 8}]]
"""Both ranks complete one prompt: only their seeds make their rollouts differ."""
LONGER = [
    ["grpo", "one", {}],
    ["dpo", "one", {"max_steps": 2}],
    ["rloo", "one", {}],
    ["reward", "beside", {}],
    ["grpo", "one", {"beta": 0.1, "adapter": True}],
    ["grpo", "beside", {"beta": 0.1, "num_iterations": 2, "steps_per_generation": 2}],
    ["dpo", "beside", {"per_device_train_batch_size": 3, "max_steps": 6}],  # uneven last batches
    ["dpo", "beside", {"adapter": True}],
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        ("fsdp2", SHORT),
        pytest.param("fsdp2", LONGER, marks=pytest.mark.slow),
        pytest.param("ddp", LONGER, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one(layout, cases, tmp_path):
    """Rollouts of a rank are its own, and the update is that of all of them on one rank."""
    trl_child.causal_lm().save_pretrained(tmp_path / "model")
    script = Path(trl_child.__file__)
    ranks = tiny_run.launch(script, tmp_path, layout, json.dumps(cases), timeout=500)
    for number, (name, how, settings) in enumerate(cases):
        first, second = (seen[number] for seen in ranks)
        assert first["dtypes"] == ["torch.float32"] and first["sharded"] == (layout == "fsdp2")
        assert not first["made"] or first["made"] != second["made"]
        if how == "beside":
            assert first["distance"] < 1e-5
            check_logs(first["logs"], first["logs_of_trl"])
            continue
        made = [own + others for own, others in zip(first["made"], second["made"], strict=True)]
        together = {**settings, "per_device_train_batch_size": 8 if made else 4}
        stock = trl_child.STOCK[trl_child.KINDS[name]]
        one = trl_child.trained(trl_child.build(stock, name, tmp_path, **together), made)
        weights = torch.load(tmp_path / f"{layout}-{number}.pt")
        assert trl_child.distance(weights, one["weights"]) < 1e-5, (name, settings)
        check_logs(first["logs"], one["logs"])


def check_logs(logs: list[dict], expected: list[dict]) -> None:
    for line, other in zip(logs, expected, strict=True):
        assert line == pytest.approx(other, abs=1e-5, rel=1e-4)
