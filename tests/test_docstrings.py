"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import nopad
import pytest

ROOMS = ("attention", "cli", "collators", "inference", "packing", "trainer")
MODULES = [
    module.name
    for room in ROOMS
    for module in pkgutil.walk_packages([f"{nopad.__path__[0]}/{room}"], f"nopad.{room}.")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_hold(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if missing == "nopad" or "nopad" in str(error):
            raise
        pytest.skip(reason=f"{name} needs {missing}, which is not installed")
    assert doctest.testmod(module).failed == 0
