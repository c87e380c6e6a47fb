"""The names of the package itself, and the attention it registers."""

from __future__ import annotations

import nopad.trainer
import pytest
import warm_python

FRONT_ENDS = ("with_accelerate", "with_hf", "with_lightning")


@pytest.mark.parametrize("name", nopad.trainer.__all__)
def test_every_name_is_that_of_its_file(name):
    value = getattr(nopad.trainer, name)
    if not name.isupper():
        assert value.__name__ == name and value.__module__.startswith("nopad.trainer.")


def run(code: str) -> str:
    done = warm_python.run(["-c", code], loaded=warm_python.LIBRARIES)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_no_trainer_library():
    libraries = ("lightning", "pytorch_lightning", "trl", "transformers.trainer", "numba")
    found = f"[name for name in {libraries} if name in sys.modules]"
    assert run(f"import sys; print({found}); import nopad.trainer; print({found})") == "[]\n[]"


@pytest.mark.parametrize("module", ["", *(f".{name}" for name in FRONT_ENDS)])
def test_importing_the_package_or_a_front_end_registers_the_attention(module):
    if module == ".with_lightning":
        pytest.importorskip("lightning", reason="this is about lightning")
    code = (
        "from transformers import AttentionInterface\n"
        "print('nopad' in AttentionInterface().valid_keys())\n"
        f"import nopad.trainer{module}\n"
        "print('nopad' in AttentionInterface().valid_keys())"
    )
    assert run(code) == "False\nTrue"


def test_another_name_is_missed_as_ever():
    with pytest.raises(AttributeError, match=r"'nopad\.trainer' has no attribute 'PackedTrainer'"):
        _ = nopad.trainer.PackedTrainer
