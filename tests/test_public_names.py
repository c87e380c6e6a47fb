"""The names people use are importable from `nopad` itself, and loaded when they are used."""

from __future__ import annotations

import subprocess
import sys

import nopad
import pytest


def run(code: str) -> str:
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


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
    assert run(f"{code}; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize(
    "room",
    ["collators", *(pytest.param(room, marks=pytest.mark.slow)
                    for room in ("attention", "trainer", "inference"))],
)  # fmt: skip
def test_importing_a_room_registers_the_attention_implementation(room):
    code = f"import nopad.{room}; from transformers import AttentionInterface as A"
    assert run(f"{code}; print('nopad' in A().valid_keys())") == "True"
