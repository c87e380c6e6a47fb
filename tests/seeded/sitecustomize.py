"""Spoil one module of the package in this process and in all it starts, right after its import.

Python runs this file at its start where the folder is on PYTHONPATH. NOPAD_FAULT_IN names the
module, NOPAD_FAULT is what is run in it.
"""

import importlib.machinery
import os
import sys


class Spoiler(importlib.machinery.PathFinder):
    """Finds the one module as ever, and spoils it once it is loaded."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != os.environ["NOPAD_FAULT_IN"]:
            return None
        spec = super().find_spec(fullname, path, target)
        load = spec.loader.exec_module

        def load_and_spoil(module):
            load(module)
            exec(os.environ["NOPAD_FAULT"], module.__dict__)

        spec.loader.exec_module = load_and_spoil
        return spec


if os.environ.get("NOPAD_FAULT_IN"):
    sys.meta_path.insert(0, Spoiler)
