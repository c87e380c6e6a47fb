"""Kernels interpreted or compiled.

Tests of this folder that need interpreted kernels are skipped where these are compiled ones, with a
GPU. `test_interpreted.py` then runs them in a child.
"""

import pytest
import torch


def kernels_are_interpreted() -> bool:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    from nopad.kernels import cross_entropy, norm  # loaded when first used, perhaps apart
    from triton.language import sum as triton_sum  # of the library, imported before all others
    from triton.runtime.interpreter import InterpretedFunction

    kernels = (triton_sum, norm._forward_kernel, cross_entropy._loss_kernel)
    return all(isinstance(kernel, InterpretedFunction) for kernel in kernels)


_ELSEWHERE = "needs interpreted kernels: test_interpreted.py runs it in a child process"


@pytest.fixture
def interpreted() -> None:
    """Skip unless kernels are interpreted: for comparisons of fp32 results."""
    if not kernels_are_interpreted():
        pytest.skip(reason=_ELSEWHERE)


@pytest.fixture
def runnable() -> None:
    """Skip unless kernels run here: compiled on a GPU, or interpreted."""
    if not (torch.cuda.is_available() or kernels_are_interpreted()):
        pytest.skip(reason=_ELSEWHERE)


@pytest.fixture
def needs_child() -> bool:
    """Whether tests were skipped here for want of interpreted kernels."""
    return not kernels_are_interpreted()
