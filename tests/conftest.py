"""Shared by all tests: a plain `pytest` uses every core, helpers are found, GPU tests may skip.

Helper modules live in `support/` folders and are imported by their bare names. Without a GPU the
Triton kernels are interpreted: TRITON_INTERPRET is read at their import.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
COMPILE = "from nopad.packing import PackedDataset as D; list(D([[1, 2, 3], [4, 5]] * 9, budget=8))"
MANY_OBJECTS = 50_000
"""Objects that files of tests leave in caches and imported modules before they are frozen."""
sys.path[:0] = [str(folder) for folder in sorted(Path(__file__).parent.rglob("support"))]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give the whole suite one single-threaded worker per core, where pytest-xdist is installed.

    Chosen files, `-m gpu`, `-n`, `--pdb` and `--collect-only` run as asked.
    """
    if hasattr(config, "workerinput") or not config.pluginmanager.hasplugin("xdist"):
        return
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    option = config.option
    if not whole or option.numprocesses is not None or option.usepdb or option.collectonly:
        return
    if config.getoption("markexpr").strip() == "gpu":  # one GPU, one process
        return
    option.numprocesses, option.dist = os.cpu_count(), "worksteal"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Dozens of processes import the package: each would compile it anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Numba compiles once, while the workers collect, instead of once in every process.
    command = [sys.executable, "-c", COMPILE]
    Thread(target=subprocess.run, args=(command,), kwargs={"check": True}).start()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only files with smoke tests for `pytest -m smoke`: all others would take longer."""
    if config.getoption("markexpr").strip() != "smoke" or collection_path.suffix != ".py":
        return None
    return True if "mark.smoke(" not in collection_path.read_text() else None


def pytest_collection_finish() -> None:
    freeze_objects()


@pytest.fixture(scope="module", autouse=True)
def freeze_what_a_file_leaves() -> Iterator[None]:
    yield
    if len(gc.get_objects()) > MANY_OBJECTS:
        freeze_objects()


def freeze_objects() -> None:
    """Take what exists now out of later collections: trainers ask for several at every start.

    With half a million objects each takes a third of a second.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def no_draws_yet() -> Iterator[None]:
    """Number the calls that draw tokens from 0, as in a new process."""
    from nopad.runtime import draw_counts, load_draw_counts

    before = draw_counts()
    load_draw_counts({})
    yield
    load_draw_counts(before)
