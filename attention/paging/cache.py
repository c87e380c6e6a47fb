"""The paged KV cache: the keys and values of every layer, in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PagedCache:
    """Keys and values in pages; layers may differ in heads and head dims.

    Args:
        num_pages: pages to allocate.
        page_size: tokens per page, at least 16.
        layer_shapes: (Hkv, Dk, Dv) of every layer.
        dtype: of keys and values.
        device: where they are.

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
    ):
        if page_size < 16:
            raise ValueError(f"page_size={page_size} is too small: use 16 or more")
        self.num_pages = num_pages
        self.page_size = page_size
        self.layer_shapes = [(heads, k, v) for heads, k, v in layer_shapes]
        # zeros, not empty: a NaN in unused memory would turn masked products into NaN
        self._layers = [
            (
                torch.zeros(num_pages, page_size, heads, key_dim, dtype=dtype, device=device),
                torch.zeros(num_pages, page_size, heads, value_dim, dtype=dtype, device=device),
            )
            for heads, key_dim, value_dim in self.layer_shapes
        ]
        self.page_bytes = self.bytes_per_page(self.layer_shapes, page_size, dtype)

    @staticmethod
    def bytes_per_page(
        layer_shapes: Sequence[tuple[int, int, int]], page_size: int, dtype: torch.dtype
    ) -> int:
        """Return the bytes of one page over all layers, to size a cache before it is built.

        `layer_shapes`, `page_size` and `dtype` are those of the cache.
        """
        return page_size * dtype.itemsize * sum(h * (k + v) for h, k, v in layer_shapes)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys [pages, page_size, Hkv, Dk] and values [..., Dv] of the layer `index`."""
        return self._layers[index]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the pages `sources` to `targets` in every layer; reads come before writes."""
        if not sources:
            return
        device = self._layers[0][0].device
        source, target = (torch.tensor(list(p), device=device) for p in (sources, targets))
        for tensors in self._layers:
            for tensor in tensors:
                tensor.index_copy_(0, target, tensor.index_select(0, source))
