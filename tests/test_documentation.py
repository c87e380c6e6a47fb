"""The README and the pages of the documentation: their code runs, and what they show is current."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from docs_reader import python_blocks, run_blocks, what_a_reader_has
from nopad.__main__ import COMMANDS, main
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted(
    page for page in (ROOT / "docs").rglob("*.md") if python_blocks(page.read_text("utf-8"))
)
ROOMS = ("attention", "collators", "inference", "packing", "recipes", "runtime", "trainer")
COMMAND_LINES = re.compile(r"^nopad ([\w-]+)(.*)$", re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    """A working directory without loggers' files, and a quiet console."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    state = torch.get_rng_state()
    yield tmp_path
    torch.set_rng_state(state)
    capsys.readouterr()


def test_the_readme_runs_as_it_stands(folder):
    names = run_blocks(README, {"__name__": "__main__"})
    assert names["engine"].generate(["Return"])[0].error is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT / "docs").as_posix())
def test_the_python_of_a_page_runs(page, folder, capsys):
    run_blocks(page, what_a_reader_has(folder))
    if page.name == "evaluate.md":
        shown = re.findall(r"^after \d+ steps:.*\n  '2 \+ 2 ='", capsys.readouterr().out, re.M)
        assert len(shown) == 3, "one of the tabs runs no evaluation"


def test_the_readme_is_short_and_names_every_command():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert [name for name in COMMANDS if f"nopad {name} " not in text] == []


def test_every_extra_is_explained_where_one_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    missing = [name for name in project["optional-dependencies"] if f"\n| `{name}` |" not in page]
    assert missing == []


def test_every_option_in_the_pages_is_one_of_its_command(capsys):
    unknown = []
    for page in (README, *(ROOT / "docs").rglob("*.md")):
        for name, rest in COMMAND_LINES.findall(page.read_text(encoding="utf-8")):
            with pytest.raises(SystemExit):
                main([name, "--help"])
            told = capsys.readouterr().out
            options = re.findall(r"(?<=\s)--[\w-]+", rest.partition("#")[0])
            unknown += [f"{page.name}: {name} {option}" for option in options if option not in told]
    assert unknown == []


def test_generated_pictures_and_tables_are_those_of_the_records(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "tools"))
    from update import generated_files

    stale = [
        path.name for path, content in generated_files().items() if path.read_text() != content
    ]
    assert stale == [], "run python docs/tools/update.py"


def test_the_page_of_families_has_every_type_and_every_cell(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "tools"))
    import families

    monkeypatch.setattr(families, "_reason", lambda kind: f"reason of {kind}")
    families._verdicts.cache_clear()
    listed = re.findall(r"`([\w-]+)`", families.types_table().partition("---")[2])
    assert sorted(listed) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "each type once"
    assert {*families.NAMES.values()} <= {*listed}
    table = families.families_table()
    families._verdicts.cache_clear()
    assert "| BLOOM | `bloom` | refused: reason of bloom | refused |" in table
    assert re.search(r"`olmoe` \| olmoe: \*\*5.31x\*\* speed, 0.07x memory", table)
    run = {"tokens_per_second": 2000.0, "beyond_training_state_GB": 3.0}
    slow = {"tokens_per_second": 1000.0, "beyond_training_state_GB": 6.0}
    failed = {"error": "OutOfMemoryError: CUDA out of memory"}
    cells = {
        "llama-1b": {"stock": slow, "nopad": run},
        "mixtral": {"stock": failed, "nopad": run},
        "olmoe": {"nopad": failed},
    }
    assert families._trained({"cells": cells}) == {
        "llama": [
            "llama-1b: **2.00x** speed, 0.50x memory, 2.0 k tokens/s",
        ],
        "mixtral": ["mixtral: 2.0 k tokens/s, stock failed"],
        "olmoe": ["olmoe: failed (OutOfMemoryError)"],
    }


def test_every_message_of_the_troubleshooting_page_is_one_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(messages) > 40
    code = "\n".join(text for room in ROOMS for text in strings_of(ROOT / room))
    patterns = {m: ".*?".join(map(re.escape, m.split("…"))) for m in messages}
    assert [m for m, pattern in patterns.items() if not re.search(pattern, code)] == []


def strings_of(room: Path) -> Iterator[str]:
    """The strings in a room's code, with … for what is formatted into them."""
    for path in room.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(value, "value", "…") for value in node.values)
                yield "".join(part if isinstance(part, str) else "…" for part in parts)
