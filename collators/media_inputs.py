"""Model inputs for the images of packs: pixel values, grids, M-RoPE positions, token types.

    images of samples  A: 1 | B: none | C: 2     pixel_values     [patches of A, patches of C]
                                                 image_grid_thw   [3, 3]
    M-RoPE             position_ids [4, 1, T]: those of the text first, then time, row and column,
                       restarting in every sample
    token types        [1, T]: 1 for tokens of images, for models whose images see themselves

A pack without images has the batch of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..packing import Pack

BY_TOKEN = ("position_ids", "mm_token_type_ids", "token_type_ids")
"""Inputs with an element for each token of a sample; all others are of images or patches."""
NESTED = "pixel_attention_mask"
"""Input of models whose images have another dimension in front, of texts."""


def media_inputs(
    packs: Sequence[Pack], widths: Sequence[int], positions: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the inputs of packs with images; the processors run now.

    widths: tokens of each pack, with padding.
    positions: `position_ids` of the text, which those of M-RoPE replace.
    """
    found, start = [], 0
    by_token: dict[str, torch.Tensor] = {}
    for pack, width in zip(packs, widths, strict=True):
        for images, begin in zip(pack.images or (), pack.cu_seqlens.tolist(), strict=False):
            if images is None:
                continue
            if len(positions) > 1:
                raise ValueError("stack=True puts packs into rows, which images are not: omit it")
            inputs = images.model_inputs()
            for name in [name for name in inputs if name in BY_TOKEN]:
                own, is_mrope = torch.from_numpy(inputs.pop(name)), name == "position_ids"
                if name not in by_token:
                    text = positions[None].repeat(4, 1, 1)
                    by_token[name] = text if is_mrope else torch.zeros_like(positions)
                row = by_token[name][1:, 0] if is_mrope else by_token[name][0]
                row[..., start + begin : start + begin + own.shape[-1]] = own
            found.append(inputs)
        start += width
    return {name: concatenate(name, found) for each in found[:1] for name in each} | by_token


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
