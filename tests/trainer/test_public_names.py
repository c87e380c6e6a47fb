"""The names of the package itself, and the attention it registers."""

from __future__ import annotations

import subprocess
import sys

import nopad.trainer
import pytest

FRONT_ENDS = ("with_accelerate", "with_hf", "with_lightning")


@pytest.mark.parametrize("name", nopad.trainer.__all__)
def test_every_name_is_that_of_its_file(name):
    value = getattr(nopad.trainer, name)
    if not name.isupper():
        assert value.__name__ == name and value.__module__.startswith("nopad.trainer.")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_no_trainer_library():
    libraries = ("lightning", "pytorch_lightning", "trl", "transformers.trainer", "numba")
    code = f"import sys, nopad.trainer; print([x for x in {libraries} if x in sys.modules])"
    assert run(code) == "[]"


MODULES = [
    "",
    ".with_hf",
    *(pytest.param(f".{name}", marks=pytest.mark.slow) for name in FRONT_ENDS if name != "with_hf"),
]


@pytest.mark.parametrize("module", MODULES)
def test_importing_the_package_or_a_front_end_registers_the_attention(module):
    if module == ".with_lightning":
        pytest.importorskip("lightning", reason="this is about lightning")
    code = (
        f"import nopad.trainer{module}\n"
        "from transformers import AttentionInterface\n"
        "print('nopad' in AttentionInterface().valid_keys())"
    )
    assert run(code) == "True"


def test_another_name_is_missed_as_ever():
    with pytest.raises(AttributeError, match=r"'nopad\.trainer' has no attribute 'PackedTrainer'"):
        _ = nopad.trainer.PackedTrainer
