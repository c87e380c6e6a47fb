"""Transposes of e4m3 against PyTorch; the products are the library's."""

from __future__ import annotations

import pytest
import torch
from interpreted_casts import exact_casts

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels.fp8_gemm import transpose

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
def round_as_a_gpu(interpreted, monkeypatch):
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_convert_float", exact_casts(interpreter._convert_float))


@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (160, 144), (256, 128)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
def test_rows_are_scaled_and_transposed_and_zeros_follow(shape, dtype):
    rows, padded = shape[0], -(-shape[0] // 16) * 16
    x, factors = (torch.randn(shape) * 100).to(dtype), 2.0 ** -torch.randint(0, 12, (shape[0], 1))
    out = transpose(x, factors)
    expected = (x.float() * factors).to(torch.float8_e4m3fn)
    assert out.shape == (shape[1], padded) and out.is_contiguous()
    assert torch.equal(out[:, :rows].float(), expected.float().T)
    assert not out[:, rows:].float().any()
