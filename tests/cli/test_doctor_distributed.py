"""`nopad doctor --distributed` on two gloo ranks: what agrees, and what each fault does."""

from pathlib import Path

import pytest
import tiny_run
from nopad.__main__ import main

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
    assert set(checks.values()) == {"ok"} and set(checks) >= {"ranks", "packs", "resume", "DDP"}
    assert first["none"][1].rstrip().endswith("All ranks agree.")
    for fault, wrong in (("data", "packs"), ("weights", "generation"), ("count", "DDP")):
        assert verdicts(first[fault][1])[wrong] == "WRONG", first[fault][1]
    assert verdicts(first["count"][1])["packs"] == "ok"


@pytest.mark.parametrize("extra", [["llama"], ["--parity"], ["--tiny"], ["--attn", "sdpa"]])
def test_options_without_effect_are_refused(extra, capsys):
    assert main(["doctor", "--distributed", *extra]) == 2
    assert "has no effect with --distributed" in capsys.readouterr().err


def test_a_single_process_is_told_how_to_start_several(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["doctor", "--distributed"]) == 2
    assert "torchrun --nproc-per-node 2 -m nopad doctor" in capsys.readouterr().err
    assert main(["doctor"]) == 2
