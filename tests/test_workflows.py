"""The workflows run commands that are there: scripts, extras, files, supported Python versions."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = sorted(path for path in (ROOT / ".ci").iterdir() if not path.suffix)
MAJOR = re.compile(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)")


def jobs(workflow: Path) -> dict[str, dict]:
    return yaml.safe_load(workflow.read_text())["jobs"]


def steps(workflow: Path) -> Iterator[dict]:
    for job in jobs(workflow).values():
        yield from job["steps"]


def commands(workflow: Path) -> Iterator[str]:
    """What the `run:` of every step is, for each entry of its job's matrix."""
    for job in jobs(workflow).values():
        for entry in job.get("strategy", {}).get("matrix", {}).get("include", [{}]):
            for step in job["steps"]:
                if "run" in step:
                    yield re.sub(
                        r"\$\{\{ matrix\.(\w+) \}\}", lambda m, e=entry: e[m[1]], step["run"]
                    )


def unknown(command: str) -> list[str]:
    """What a command names and the repository does not have."""
    wrong = []
    if subprocess.run(["bash", "-n", "-c", command], capture_output=True).returncode:
        wrong.append("not a command of bash")
    for word in re.findall(r"(?:^|\s)((?:\.ci|tests)/[\w./]*\w|[\w-]+\.(?:txt|py|toml))", command):
        if not (ROOT / word).exists():
            wrong.append(word)
    for word in re.findall(r"^\.ci/\w+", command, re.MULTILINE):
        if not os.access(ROOT / word, os.X_OK):
            wrong.append(f"{word} is not executable")
    for extra in re.findall(r"\.\[([\w,]+)\]", command):
        wrong += [e for e in extra.split(",") if e not in PROJECT["optional-dependencies"]]
    return wrong


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_is_there(workflow):
    assert [(line, bad) for line in commands(workflow) if (bad := unknown(line))] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_names_is_there(script):
    assert unknown(script.read_text()) == []
    assert os.access(script, os.X_OK) and "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_jobs_are_limited(workflow):
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert [name for name in used if not MAJOR.fullmatch(name)] == []
    assert all("timeout-minutes" in job for job in jobs(workflow).values())
    text = yaml.safe_load(workflow.read_text())
    assert text["permissions"] == {"contents": "read"}, "more is granted to one job at a time"


def test_ci_runs_one_command_on_every_supported_python():
    check = jobs(ROOT / ".github" / "workflows" / "ci.yml")["check"]
    assert [step["run"] for step in check["steps"] if "run" in step] == [".ci/run"]
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert check["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_pypi_is_told_by_the_job_that_publishes_alone():
    publish = jobs(ROOT / ".github" / "workflows" / "publish.yml")
    grants = {name: job.get("permissions") for name, job in publish.items()}
    assert grants == {"build": None, "publish": {"id-token": "write"}}
    assert not [step for step in publish["publish"]["steps"] if "run" in step]


def test_pre_commit_runs_the_ruff_of_ci():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = [repo["rev"] for repo in hooks if "ruff" in repo["repo"]]
    assert f"ruff=={ruff.removeprefix('v')}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_reader_of_commands_sees_what_is_missing():
    missing = {
        ".ci/runn": [".ci/runn", ".ci/runn is not executable"],
        'pip install -c constraint.txt -e ".[dev,doc]"': ["constraint.txt", "doc"],
        "pytest tests/trainer/with_jax": ["tests/trainer/with_jax"],
        "if true": ["not a command of bash"],
    }
    assert {command: unknown(command) for command in missing} == missing
    assert unknown('.ci/run && pip install -c constraints.txt -e ".[dev]"') == []
