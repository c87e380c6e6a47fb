"""Products of few rows against PyTorch, however they are tiled."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu
from torch.testing import assert_close

pytest.importorskip("triton", reason="the kernels are written in Triton")

from nopad.kernels import GemmTiles, gated_gemm, gated_gemm_tiles, gemm_tiles, split_k_gemm


@pytest.fixture(params=[5, 16, 40])
def operands(request, interpreted):
    torch.manual_seed(request.param)
    left, right = torch.randn(2, 200, 128) / 10
    return torch.randn(request.param, 128), left, right


@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_partial_sums_add_up_to_the_product(operands, num_splits):
    x, weight, _ = operands
    partials = split_k_gemm(x, weight, GemmTiles(16, 64, 32, num_splits), use_pdl=False)
    assert partials.shape == (num_splits, len(x), 200)
    assert_close(partials.sum(0), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_the_gated_product_is_silu_of_one_times_the_other(operands):
    x, gate, up = operands
    out = gated_gemm(x, gate, up, GemmTiles(16, 64, 32, 1), use_pdl=False)
    assert_close(out, silu(x @ gate.T) * (x @ up.T), rtol=1e-4, atol=1e-4)


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr("nopad.kernels.skinny_gemm.sm_count", lambda device: 132)


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize(
    ("num_rows", "columns", "width", "expected"),
    [
        (32, 2048, 8192, GemmTiles(32, 64, 256, 4, 3)),
        (64, 2048, 8192, GemmTiles(64, 64, 128, 4)),
        (128, 2048, 8192, GemmTiles(128, 64, 128, 4)),
        (192, 2048, 8192, GemmTiles(64, 128, 128, 2)),
        (256, 2048, 8192, GemmTiles(128, 64, 128, 2)),
        (256, 2048, 2048, GemmTiles(64, 64, 128, 1, 6)),
        (256, 1024, 2048, GemmTiles(64, 64, 128, 2, 6)),
        (512, 4096, 1024, GemmTiles(128, 128, 64)),
        (256, 3072, 2048, None),  # no tiles make a whole wave
        (160, 2048, 8192, None),  # the last tile would not be full
        (513, 2048, 2048, None),
        (32, 2048, 2000, None),
    ],
)
def test_tiles_make_one_wave_or_are_left_to_the_library(num_rows, columns, width, expected):
    assert gemm_tiles(num_rows, torch.empty(columns, width, device="cpu")) == expected


@pytest.mark.usefixtures("on_h200")
def test_weights_that_tma_cannot_read_are_left_to_the_library():
    shifted = torch.empty(2048 * 2048 + 1)[1:].view(2048, 2048)
    whole = torch.empty(2048, 2048)
    assert gemm_tiles(32, whole) and gated_gemm_tiles(32, whole, whole)
    assert gemm_tiles(32, shifted) is None
    assert gated_gemm_tiles(32, whole, shifted) is None
    assert gemm_tiles(32, torch.empty(2048, 4096)[:, :2048]) is None


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize(
    ("num_rows", "fused"),
    [
        *((192, True), (256, True), (384, False), (448, False), (512, True)),
        *((640, False), (2048, True), (2050, False), (4096, False)),
    ],
)
def test_a_wide_gated_product_is_fused_where_its_tiles_are_full(num_rows, fused):
    weight = torch.empty(8192, 2048)
    assert (gated_gemm_tiles(num_rows, weight, weight) is not None) == fused


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "columns", "width"),
    [
        *((rows, 3072, 1024) for rows in (64, 256, 640, 1152, 2048)),
        *((rows, 8192, 2048) for rows in (64, 256, 1152, 2048)),
    ],
)
def test_the_gated_product_of_many_rows_on_a_gpu(num_rows, columns, width):
    torch.manual_seed(0)
    x, gate, up = (
        torch.randn(rows, width, dtype=torch.bfloat16, device="cuda") / 8
        for rows in (num_rows, columns, columns)
    )
    tiles = gated_gemm_tiles(num_rows, gate, up)
    assert tiles is not None
    want = silu((x @ gate.T).float()).bfloat16() * (x @ up.T)
    assert_close(gated_gemm(x, gate, up, tiles, use_pdl=True), want, rtol=2e-2, atol=2e-2)
