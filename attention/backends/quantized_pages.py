"""8-bit KV pages in plain torch: write a step's keys and values, dequantize the pages of a step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..paging.quantized import dequantize, quantize
from ..varlen import Varlen


def write_quantized(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
) -> None:
    """Write k [T, Hkv, Dk] and v [T, Hkv, Dv] into KV slots [T] of a layer in 8 bits."""
    page, offset = slots // keys.shape[1], slots % keys.shape[1]
    for x, pages, page_scales in ((k, keys, key_scales), (v, values, value_scales)):
        pages[page, offset], page_scales[page, :, offset] = quantize(x, pages.dtype)


def dequantize_pages(
    dtype: torch.dtype,
    keys: Tensor,
    values: Tensor,
    varlen: Varlen,
    key_scales: Tensor,
    value_scales: Tensor,
) -> tuple[Tensor, Tensor, Varlen]:
    """Return the pages of a step's sequences in another dtype, and a table of these alone."""
    pages = varlen.pages
    assert pages is not None
    first_key = torch.arange(pages.table.shape[1], device=keys.device) * keys.shape[1]
    is_read = first_key < pages.lengths[:, None]
    used, table = torch.unique(torch.where(is_read, pages.table, 0), return_inverse=True)
    keys, values = (
        dequantize(x[used], scales[used].transpose(1, 2), dtype)
        for x, scales in ((keys, key_scales), (values, value_scales))
    )
    return keys, values, replace(varlen, pages=replace(pages, table=table.to(pages.table.dtype)))
