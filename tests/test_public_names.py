"""The names people use are importable from `nopad` itself, and loaded when they are used."""

from __future__ import annotations

import subprocess
import sys

import nopad
import pytest
import warm_python


@pytest.mark.parametrize("name", sorted({*nopad.__all__} - {"__version__"}))
def test_every_name_is_that_of_its_room(name):
    value = getattr(nopad, name)
    assert value.__name__ == name and value.__module__.startswith("nopad.")


def test_the_lazy_names_are_those_listed():
    assert {*nopad._HOMES, "__version__"} == set(nopad.__all__)
    assert {*nopad.__all__} <= set(dir(nopad))


def test_another_name_is_missing_as_usual():
    with pytest.raises(AttributeError, match="'nopad' has no attribute 'Trainer'"):
        _ = nopad.Trainer


def test_packing_needs_no_torch():
    code = "import sys, nopad; nopad.pack_lengths([3, 4], 8); nopad.Packer; nopad.Sample"
    child = subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"])
    assert child.returncode == 0


@pytest.mark.parametrize("room", ["collators", "attention", "trainer", "inference"])
def test_importing_a_room_registers_the_attention_implementation(room):
    program = f"""
import sys
from transformers import AttentionInterface

assert not any(name.startswith("nopad") for name in sys.modules)
assert "nopad" not in AttentionInterface().valid_keys()
import nopad.{room}
assert "nopad" in AttentionInterface().valid_keys()
"""
    child = warm_python.run(["-c", program], loaded=warm_python.LIBRARIES)
    assert child.returncode == 0, child.stderr
