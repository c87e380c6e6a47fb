"""`nopad doctor --distributed` on two gloo ranks: what agrees, and what each fault does."""

from pathlib import Path

import pytest
import tiny_run
import torch
from nopad.__main__ import main
from nopad.cli import doctor_distributed

CHECKS = ["ranks", "packs", "resume", "DDP", "FSDP2", "SP", "TP", "generation"]
CPU = torch.device("cpu")
CHILD = Path(__file__).parent / "support" / "doctor_child.py"


def verdicts(text: str) -> dict[str, str]:
    """{check: verdict} of a printed table."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) > 1 and row[1] in ("ok", "WRONG")}


def test_ranks_that_agree_pass_and_each_fault_is_told_on_all_ranks():
    first, second = tiny_run.launch(CHILD, "none", "data", "weights", "count", timeout=120)
    assert {name: status for name, (status, _) in first.items()} == {
        "none": 0, "data": 1, "weights": 1, "count": 1,
    }  # fmt: skip
    assert [status for status, _ in second.values()] == [0, 1, 1, 1]
    assert {text for _, text in second.values()} == {""}, "one rank prints"
    checks = verdicts(first["none"][1])
    assert set(checks.values()) == {"ok"} and list(checks) == CHECKS
    assert first["none"][1].rstrip().endswith("All ranks agree.")
    wrong = {"data": "packs", "weights": "generation", "count": "DDP"}
    for fault, text in ((fault, first[fault][1]) for fault in wrong):
        assert [name for name, told in verdicts(text).items() if told == "WRONG"] == (
            wrong[fault].split()
        ), text
    assert verdicts(first["count"][1])["packs"] == "ok"


@pytest.mark.slow
def test_a_wrong_count_is_told_in_groups_that_share_a_model():
    first, _ = tiny_run.launch(CHILD, "count in groups", timeout=120)
    status, text = first["count in groups"]
    assert status == 1
    assert [name for name, told in verdicts(text).items() if told == "WRONG"] == ["SP", "TP"], text


def test_groups_that_a_number_of_ranks_does_not_allow_are_skipped(monkeypatch):
    monkeypatch.setattr(doctor_distributed, "world_size", lambda: 3)
    row = doctor_distributed._run("SP", lambda _: str(doctor_distributed._group_axis()), CPU)
    assert not row.faults
    assert str(row) == "SP           skipped 3 ranks do not form equal groups of 2, 4 or 8"


def test_tensor_parallel_groups_that_cannot_be_sharded_are_skipped(
    monkeypatch,
):
    monkeypatch.setattr("transformers.__version__", "5.17.3")
    monkeypatch.setattr(doctor_distributed, "world_size", lambda: 12)
    row = doctor_distributed._run("TP", doctor_distributed.check_tensor_parallel, CPU)
    assert str(row).startswith("TP           skipped 3 groups need Transformers 5.18 or later")


@pytest.mark.parametrize("extra", [["llama"], ["--parity"], ["--tiny"], ["--attn", "sdpa"]])
def test_options_without_effect_are_refused(extra, capsys):
    assert main(["doctor", "--distributed", *extra]) == 2
    assert "has no effect with --distributed" in capsys.readouterr().err


def test_a_single_process_is_told_how_to_start_several(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["doctor", "--distributed"]) == 2
    assert "torchrun --nproc-per-node 2 -m nopad doctor" in capsys.readouterr().err
    assert main(["doctor"]) == 2
