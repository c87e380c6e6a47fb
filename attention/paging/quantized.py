"""Quantize keys and values in torch: int8 or float8_e4m3fn, with a scale per token and KV head.

    a key [D] ─▶ scale: its largest number / 127 (int8) or 448 (fp8), in bfloat16
              ─▶ key / scale, rounded to 8 bits; nothing is saturated

The numbers of a token depend on no other token. They are written once, whatever the chunks of the
prompt and the tokens that follow, and pages are shared and copied like others. A row with a NaN or
an infinity has such a scale, so none of its numbers is finite again.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each dtype."""
SCALE_DTYPE = torch.bfloat16
_SMALLEST_SCALE = 2.0**-120
"""Also that of zeros; smaller numbers would be subnormal in bfloat16."""


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [..., D] in 8 bits, and its scales [...].

    >>> rows, scales = quantize(torch.tensor([[63.5, -31.75, 0.8], [0.0, 0.0, 0.0]]), torch.int8)
    >>> rows.tolist()[0], scales.tolist()[0]
    ([127, -64, 2], 0.5)
    """
    x = x.float()
    scales = (x.abs().amax(-1) / LARGEST[dtype]).clamp_(min=_SMALLEST_SCALE).to(SCALE_DTYPE)
    rows = x / scales.float()[..., None]
    return (rows if dtype.is_floating_point else rows.round()).to(dtype), scales


def dequantize(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [..., D], in 8 bits with scales [...], in another dtype."""
    return (x.float() * scales.float()[..., None]).to(dtype)
