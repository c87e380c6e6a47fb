"""A checkpoint of our own, with a tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory) -> Path:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from small_checkpoint import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def terminal(monkeypatch):
    """Let standard output and error look like terminals; return a setter of the environment."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    return monkeypatch.setenv
