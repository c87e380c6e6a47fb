"""The names of the package itself: all there, none of them loaded before it is used."""

from __future__ import annotations

import subprocess
import sys

import nopad.trainer
import pytest

HEAVY = ("torch", "transformers", "accelerate", "lightning", "triton", "numba")


@pytest.mark.parametrize("name", nopad.trainer.__all__)
def test_every_name_is_that_of_its_file(name):
    found = getattr(nopad.trainer, name)
    assert found.__name__ == name and found.__module__.startswith("nopad.trainer.")


def test_importing_the_package_loads_no_library():
    code = f"import sys, nopad.trainer; print([x for x in {HEAVY} if x in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def test_another_name_is_missed_as_ever():
    with pytest.raises(AttributeError, match=r"'nopad\.trainer' has no attribute 'PackedTrainer'"):
        _ = nopad.trainer.PackedTrainer
