"""`SampleImages`: references to a sample's images, and the model inputs made of them on request.

    row ─▶ ImageEncoder ─▶ Sample: tokens, references ─▶ Pack ─▶ collator ─▶ pixel_values, grids
             │ the processor counts the tokens                     │ the processor makes pixels,
             ▼ of the images                                       ▼ in the worker
           no pixels are kept, in memory or in a state

A sample with images is never cut: its images belong to all of its tokens.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TEXT_INPUTS = ("input_ids", "attention_mask", "offset_mapping", "text_replacement_offsets")
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names of an input that is 1 for tokens of images and 0 for text."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleImages:
    """The images of one sample, in the order of their places in its text."""

    processor: Any
    text: str
    """The text of the sample, with one placeholder for each image."""
    references: tuple[Any, ...]
    """The images as the row has them: paths, bytes, PIL images or arrays."""
    num_tokens: int
    """Tokens of the sample, with those of the images."""
    text_tokens: int
    """Tokens without an eos that is not in the text."""
    special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to the text."""

    def model_inputs(self) -> dict[str, np.ndarray]:
        """Return the inputs of the model besides tokens: pixels, grids, positions, token types.

        `position_ids` [3, T] are those of M-RoPE, counted from the start of the sample; they take
        the place of token types.
        """
        found = process(self.processor, self.text, self.references, self.special_tokens)
        tokens = len(found["input_ids"][0])
        if tokens != self.text_tokens:
            raise ValueError(
                f"a sample with images has {tokens} tokens, and had {self.text_tokens} when they "
                "were counted: a file of an image was changed"
            )
        inputs = {name: np.asarray(found[name]) for name in found if name not in TEXT_INPUTS}
        for name in [name for name in inputs if name in TOKEN_TYPES]:
            types = np.pad(inputs.pop(name)[0], (0, self.num_tokens - tokens))
            if "image_grid_thw" in inputs:
                merge = self.processor.image_processor.merge_size
                inputs["position_ids"] = mrope_positions(types, inputs["image_grid_thw"], merge)
            else:
                inputs[name] = types
        return inputs

    def inputs_alone(self) -> dict[str, np.ndarray]:
        """Return the inputs of a model for the text alone, which finds the positions itself."""
        found = process(self.processor, self.text, self.references, self.special_tokens)
        return {name: np.asarray(found[name]) for name in found if name != "attention_mask"}

    def fingerprint(self) -> str:
        """Identify the images: files by name and size, others by their content."""
        digest = hashlib.blake2b(digest_size=12)
        for reference in map(_unwrap, self.references):
            if isinstance(reference, str):
                content = f"{reference} {os.path.getsize(reference)}".encode()
            else:
                is_bytes = isinstance(reference, bytes)
                content = reference if is_bytes else np.asarray(load_image(reference)).tobytes()
            digest.update(hashlib.blake2b(content).digest())
        return digest.hexdigest()


def process(
    processor: Any, text: str, references: Sequence[Any], special_tokens: bool, **options: Any
) -> dict[str, Any]:
    """Run a processor on one text with its images; raise unless there is a place for each."""
    places = text.count(processor.image_token)
    if places != len(references):
        raise ValueError(
            f"{len(references)} images for {places} places in the text ({processor.image_token}): "
            'a chat has a place for each {"type": "image"} part'
        )
    images = [[load_image(reference) for reference in references]] if references else None
    found = dict(
        processor(text=[text], images=images, add_special_tokens=special_tokens, **options)
    )
    types = found.get("token_type_ids")
    if types is not None and not images:
        del found["token_type_ids"]
    elif types is not None and not np.array_equal(types, _are_images(processor, found)):
        raise ValueError(
            f"{type(processor).__name__} is of a model that sees a prompt in both directions, "
            "which packs do not support: train it on padded batches"
        )
    return found


def _are_images(processor: Any, inputs: Mapping[str, Any]) -> np.ndarray:
    """Return the token types of a model whose images alone have one of their own."""
    ids = getattr(processor, "image_token_ids", [processor.image_token_id])
    return np.isin(np.asarray(inputs["input_ids"]), ids).astype(int)


def load_image(reference: Any) -> Any:
    """Return an image of a row as an RGB image of PIL, or raise if it cannot be read."""
    from PIL import Image, UnidentifiedImageError

    reference = _unwrap(reference)
    if isinstance(reference, str) and "://" in reference:
        raise ValueError(f"image {reference:.200} is a URL: download it, and pass its path")
    try:
        if isinstance(reference, bytes):
            reference = Image.open(io.BytesIO(reference))
        elif isinstance(reference, str):
            with Image.open(reference) as opened:
                return opened.convert("RGB")
        elif isinstance(reference, np.ndarray):
            reference = Image.fromarray(reference)
        return reference.convert("RGB")
    except FileNotFoundError:
        raise ValueError(f"image {reference!s:.200} does not exist") from None
    except (UnidentifiedImageError, OSError, AttributeError, TypeError) as error:
        raise ValueError(f"image {reference!r:.200} cannot be read: {error}") from None


def _unwrap(reference: Any) -> Any:
    """Return a path as text, and the bytes or path of an undecoded image of a `datasets` column."""
    if isinstance(reference, Mapping):
        content = reference.get("bytes")
        reference = reference.get("path") if content is None else content
    return os.fspath(reference) if isinstance(reference, os.PathLike) else reference


def check_uncut(images: Sequence[SampleImages | None], lengths: np.ndarray) -> None:
    """Raise if a sequence has only a part of the tokens of a sample with images.

    images: of each sequence; none if no sample has any.
    """
    for sample, length in zip(images, lengths.tolist(), strict=False):
        if sample is not None and sample.num_tokens != length:
            raise ValueError(
                f"a document with images has {sample.num_tokens} tokens, and {length} of them "
                "would be cut out: pass overflow='drop', or a larger budget"
            )


def mrope_positions(types: Any, grids: np.ndarray, merge: int) -> np.ndarray:
    """int64 [3, T]: the time, row and column of each token in M-RoPE, as in Qwen2-VL.

    types: 1 for tokens of images, 0 for text.
    grids: time, rows and columns of patches of each image; `merge` x `merge` are one token.

    >>> mrope_positions([0, 1, 1, 1, 1, 1, 1, 0], np.array([[1, 4, 6]]), merge=2).tolist()
    [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]]
    """
    kinds, parts, position, images = np.asarray(types), [], 0, iter(grids.tolist())
    bounds = np.flatnonzero(np.diff(kinds)) + 1
    for run in np.split(kinds, bounds):
        if run[0]:
            time, rows, columns = next(images)
            rows, columns = rows // merge, columns // merge
            parts.append(np.indices((time, rows, columns)).reshape(3, -1) + position)
            position += max(rows, columns)
        else:
            parts.append(np.tile(np.arange(position, position + len(run)), (3, 1)))
            position += len(run)
    return np.concatenate(parts, axis=1)
