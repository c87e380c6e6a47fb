"""Model inputs for the images of packs: pixel values, grids and M-RoPE positions, concatenated.

    images of samples  A: 1 | B: none | C: 2     pixel_values     [patches of A, patches of C]
                                                 image_grid_thw   [3, 3]
    M-RoPE             position_ids [4, 1, T]: those of the text first, then time, row and column,
                       restarting in every sample

A pack without images has the batch of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..packing import Pack

NESTED = "pixel_attention_mask"
"""Input of models whose images have another dimension in front, of texts."""


def media_inputs(
    packs: Sequence[Pack], widths: Sequence[int], positions: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the inputs of packs with images; the processors run now.

    widths: tokens of each pack, with padding.
    positions: `position_ids` of the text, which those of M-RoPE replace.
    """
    found, mrope, start = [], None, 0
    for pack, width in zip(packs, widths, strict=True):
        for images, begin in zip(pack.images or (), pack.cu_seqlens.tolist(), strict=False):
            if images is None:
                continue
            if len(positions) > 1:
                raise ValueError("stack=True puts packs into rows, which images are not: omit it")
            inputs = images.model_inputs()
            own = inputs.pop("position_ids", None)
            if own is not None:
                mrope = positions[None].repeat(4, 1, 1) if mrope is None else mrope
                begin += start
                mrope[1:, 0, begin : begin + own.shape[1]] = torch.from_numpy(own)
            found.append(inputs)
        start += width
    batch = {name: concatenate(name, found) for each in found[:1] for name in each}
    return batch if mrope is None else {**batch, "position_ids": mrope}


def concatenate(name: str, inputs: list[dict[str, Any]]) -> torch.Tensor:
    """Concatenate an input of all samples along the images or patches."""
    arrays = [each[name] for each in inputs]
    axis = int(NESTED in inputs[0])
    shapes = {array.shape[axis + 1 :] for array in arrays}
    if len(shapes) > 1:
        raise ValueError(
            f"{name} of images in one pack has the shapes {sorted(shapes)}: let the processor "
            "resize images to one size"
        )
    return torch.from_numpy(np.concatenate(arrays, axis=axis))
