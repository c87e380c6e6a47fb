"""Casts to bfloat16 and fp8 in Triton's interpreter, which loses the carry of a mantissa."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def exact_casts(convert: Any) -> Any:
    """Return a replacement of the interpreter's `_convert_float` that rounds as a GPU does."""
    import triton.language as tl

    dtypes = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
    bits = {tl.bfloat16: torch.int16, tl.float8e4nv: torch.uint8}

    def rounded(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target not in dtypes or source is not tl.float32:
            return convert(x, source, target, rounding)
        numbers = torch.from_numpy(np.array(x, copy=True).view(np.float32))
        return numbers.to(dtypes[target]).view(bits[target]).numpy()

    return rounded
