"""A reader's budget: the files from a row to the loss, and from a prompt to its completion."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import warm_python

ROOT = Path(__file__).parents[1]
PATHS = {
    "loss": ("### From a row to the loss", 25, 5_000),
    "completion": ("### From a prompt to its completion", 20, 3_900),
}
"""The section of CONTRIBUTING that lists a path, and the files and lines it may have at most."""


def listed(heading: str) -> tuple[list[str], list[str]]:
    """The files of a path, and those called on the way that a reader need not open."""
    section = re.split(r"\n##+ ", (ROOT / "CONTRIBUTING.md").read_text().split(heading)[1])[0]
    on_path = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    return on_path, re.findall(r"`([^`]+\.py)`", section.split("Called on the way")[1])


@pytest.mark.parametrize("path", PATHS)
def test_every_file_on_the_path_is_listed(path):
    on_path, beside = listed(PATHS[path][0])
    script = Path(__file__).parent / "support/trace_path.py"
    ran = warm_python.run([script, path])
    assert ran.returncode == 0, ran.stderr[-2000:]
    called = json.loads(ran.stdout.splitlines()[-1])
    assert set(called) - {*on_path, *beside} == set(), "called, but not in CONTRIBUTING"
    assert {*on_path, *beside} - set(called) == set(), "in CONTRIBUTING, but not called"
    assert not set(on_path) & set(beside)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_has_few_files_and_lines(path):
    heading, max_files, max_lines = PATHS[path]
    on_path, _ = listed(heading)
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in on_path)
    assert len(on_path) <= max_files and lines <= max_lines, (len(on_path), lines)
