"""`PagedCache`: the tensors of the KV cache, with the keys and values of every layer in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .quantized import SCALE_DTYPE


class PagedCache:
    """Keys and values in pages; layers may differ in heads and head dims.

    Args:
        num_pages: pages to allocate.
        page_size: tokens per page, at least 16.
        layer_shapes: (Hkv, Dk, Dv) of every layer.
        dtype: of keys and values.
        device: where they are.
        quantized: the 8-bit dtype to store them in, with scales; attention computes in `dtype`.

    >>> cache = PagedCache(8, 16, [(2, 64, 64), (2, 96, 64)], torch.float32, "cpu")
    >>> [tuple(t.shape) for t in cache.layer(1)], cache.page_bytes
    ([(8, 16, 2, 96), (8, 16, 2, 64)], 36864)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        layer_shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device | str,
        quantized: torch.dtype | None = None,
    ):
        if page_size < 16:
            raise ValueError(f"page_size={page_size} is too small: use 16 or more")
        self.num_pages, self.page_size = num_pages, page_size
        self.dtype, self.quantized, self.device = dtype, quantized, torch.device(device)
        self.layer_shapes = [(heads, k, v) for heads, k, v in layer_shapes]
        # zeros, not empty: a NaN in unused memory would turn masked products into NaN
        self._layers = []
        for heads, *dims in self.layer_shapes:
            kinds = [((num_pages, page_size, heads, dim), quantized or dtype) for dim in dims]
            kinds += [((num_pages, heads, page_size), SCALE_DTYPE)] * 2 if quantized else []
            self._layers.append([torch.zeros(s, dtype=d, device=device) for s, d in kinds])
        self.page_bytes = self.bytes_per_page(self.layer_shapes, page_size, quantized or dtype)

    @staticmethod
    def bytes_per_page(
        layer_shapes: Sequence[tuple[int, int, int]], page_size: int, dtype: torch.dtype
    ) -> int:
        """Return the bytes of one page over all layers, to size a cache before it is built.

        `layer_shapes` and `page_size` are those of the cache, `dtype` is what it stores.
        """
        size, scales = dtype.itemsize, 2 * SCALE_DTYPE.itemsize if dtype.itemsize == 1 else 0
        return page_size * sum(h * ((k + v) * size + scales) for h, k, v in layer_shapes)

    def layer(self, index: int) -> list[Tensor]:
        """Return keys [pages, page_size, Hkv, Dk], values, and any scales of the layer `index`."""
        return self._layers[index]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the pages `sources` to `targets` in every layer; reads come before writes."""
        if not sources:
            return
        device = self._layers[0][0].device
        source, target = (torch.tensor(list(p), device=device) for p in (sources, targets))
        for tensors in self._layers:
            for tensor in tensors:
                data = tensor.view(torch.uint8)  # no copy has to support 8-bit floats
                data.index_copy_(0, target, data.index_select(0, source))
