"""Where test helpers are found, and tests marked `gpu` skip where there is no GPU.

Helper modules live in `support/` folders and are imported by their bare names.
"""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(folder) for folder in sorted(Path(__file__).parent.rglob("support"))]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
