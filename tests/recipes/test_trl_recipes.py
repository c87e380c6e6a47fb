"""grpo and dpo as a user runs them."""

from __future__ import annotations

import json

import pytest
import small_inputs
from nopad.recipes import dpo, grpo

pytest.importorskip("trl", reason="the recipes run TRL's trainers")
SHORT = ["--prompts", "4", "--generations", "4", "--save-every", "1"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(grpo, "PRETRAIN_STEPS", 2)


def weights(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_grpo_resumes_with_the_weights_of_an_uninterrupted_run(tmp_path, capsys):
    whole = tmp_path / "whole"
    small_inputs.train("grpo", [*SHORT, "--steps", "2", "--output", whole])
    assert "reward" in capsys.readouterr().out
    assert "reward" in (whole / "training.svg").read_text()
    expected = weights(whole)
    (whole / "checkpoint-2" / "trainer_state.json").write_text("damaged")  # its manifest tells
    (whole / "model.safetensors").unlink()
    small_inputs.train("grpo", ["--resume", whole])
    assert weights(whole) == expected


def test_an_answer_of_several_digits_is_rewarded():
    tokenizer = grpo.character_tokenizer()
    ids = tokenizer("3+9=12")["input_ids"]
    assert tokenizer.decode(ids) == "3+9=12"
    assert grpo.correct([tokenizer.decode(ids[4:])], ["12"]) == [1.0]


def test_dpo_learns_pairs_from_solutions(tmp_path, capsys):
    base = small_inputs.checkpoint(tmp_path)
    rows = [{"question": f"w{n}", "answer": f"w{n} {n}"} for n in range(8)]
    (tmp_path / "solutions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = [base, "--data", "solutions.jsonl", "--tokenizer", small_inputs.tokenizer(tmp_path)]
    small_inputs.train("dpo", [*inputs, "--steps", "2", "--batch", "2", "--output", "out"])
    assert "rewards/accuracies" in capsys.readouterr().out
    assert (tmp_path / "out" / "training.svg").exists()


def test_a_rejected_answer_has_one_wrong_number():
    pair = dpo.to_pair("How many?", "2 + 30 = 32 #### 32", seed=1)
    assert pair["chosen"] == "2 + 30 = 32 #### 32" != pair["rejected"]
    changed = zip(pair["chosen"].split(), pair["rejected"].split(), strict=True)
    assert sum(a != b for a, b in changed) == 1
    with pytest.raises(ValueError, match="has no number to change"):
        dpo.to_pair("How many?", "none")


def test_wrong_data_and_options_are_told_in_one_line(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    base = [small_inputs.checkpoint(tmp_path), "--tokenizer", small_inputs.tokenizer(tmp_path)]
    for recipe, argv, line in [
        ("dpo", [*base, "--data", "rows.jsonl"], "pairs need prompt, chosen and rejected"),
        ("dpo", base, "--data is required"),
        ("grpo", ["--beta", "0.1"], "--beta needs a MODEL"),
        ("grpo", ["--generations", "1"], "at least 2 generations"),
    ]:
        assert small_inputs.status(recipe, argv) == 2
        (told,) = capsys.readouterr().err.strip().splitlines()[-1:]
        assert line in told
