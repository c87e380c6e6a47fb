"""The product that reads its weights ahead: compiled; equal to the other on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytest.importorskip("nopad.kernels.hopper_gemm", reason="Gluon of Triton 3.6 or later")

from nopad.kernels import GemmTiles, gemm_tiles, skinny_gemm, split_k_gemm

_COMPILE = """
import ast, sys
import triton
from nopad.kernels.hopper_gemm import _layout, _split_k_kernel as kernel
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

for block_m, block_n, block_k, stages, warps, dtype in ast.literal_eval(sys.argv[1]):
    sizes = dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, NUM_STAGES=stages)
    constants = sizes | {"num_warps": warps}
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    for name, rows in (("x", block_m), ("weight", block_n)):
        layout = _layout(rows, block_k)
        signature[name] = f"tensordesc<bf16[{rows}, {block_k}],{layout!r}>"
    signature["out"] = "*" + dtype
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, values)
    options = {"num_warps": warps, "launch_pdl": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")
    copies = [i for i in range(len(ptx)) if ptx.startswith("cp.async.bulk.tensor", i)]
    assert sum(i < wait for i in copies) >= stages, "weights are not read before the wait"
    assert sum(i > wait for i in copies) >= stages, "x is not read after the wait"
"""


LARGE = [(64, 64, 128, 5, 4, "bf16"), (128, 128, 64, 4, 8, "bf16")]


@pytest.mark.parametrize(
    "shapes", [[(16, 64, 256, 3, 4, "fp32")], pytest.param(LARGE, marks=pytest.mark.slow)], ids=len
)
def test_it_compiles_for_hopper_and_reads_its_weights_before_it_waits(shapes):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", _COMPILE, repr(shapes)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_a_triton_that_cannot_compile_it_uses_the_other_kernel(interpreted, monkeypatch, caplog):
    def fail(*args):
        raise AttributeError("no async_load")

    monkeypatch.setattr(skinny_gemm, "launch_split_k", fail)
    torch.manual_seed(0)
    x, weight, tiles = (
        torch.randn(5, 128).half(),
        torch.randn(200, 128).half(),
        GemmTiles(16, 64, 32),
    )
    out = x.new_empty(1, 5, 200)
    assert not skinny_gemm._launch_ahead(x, weight, out, tiles)
    assert not skinny_gemm._launch_ahead(x, weight, out, tiles)
    (record,) = caplog.records
    assert "AttributeError: no async_load" in record.message
    assert_close(split_k_gemm(x, weight, tiles, use_pdl=False)[0], x @ weight.T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 16, 64, 128, 192, 512])
@pytest.mark.parametrize(("columns", "width"), [(3072, 2048), (2048, 8192), (1000, 1024)])
def test_on_a_gpu_it_gives_what_the_triton_kernel_gives(
    num_rows, columns, width, dtype, monkeypatch
):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(rows, width, dtype=dtype, device="cuda") / 8 for rows in (num_rows, columns)
    )
    tiles = gemm_tiles(num_rows, weight) or GemmTiles(64, 64, 128)
    out = split_k_gemm(x, weight, tiles, use_pdl=True)
    assert skinny_gemm.launch_split_k is not None
    monkeypatch.setattr(skinny_gemm, "launch_split_k", None)
    assert torch.equal(out, split_k_gemm(x, weight, tiles, use_pdl=True))
    assert_close(out.float().sum(0), (x @ weight.T).float(), rtol=2e-2, atol=5e-2)
