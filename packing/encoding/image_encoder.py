"""`ImageEncoder`: rows with images to samples, by the processor in PackedDataset(tokenizer=).

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                               {"type": "text", "text": "What is this?"}]}, ...]}
    {"messages": ..., "images": ["cat.png"]}          for the parts {"type": "image"}, in order
    {"text": "<image> is a cat", "images": [...]}     with the placeholder of the processor

Rows are read as those of text are, with the processor in the place of the tokenizer. The tokens of
images are never labels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from ..images import SampleImages, process
from ..sample import IGNORE_INDEX, Sample
from ..token_ids import IMAGE_PARTS
from .encoder import Encoder, as_value_error

REFERENCES = ("image", "path", "url", "image_url")
"""Keys of an image part that say what the image is."""


class ImageEncoder(Encoder):
    """Encodes rows with images by a processor, and rows of text by its tokenizer."""

    tokens_suffice = False

    def __init__(self, processor: Any, **options: Any):
        super().__init__(processor.tokenizer, **options)
        self.processor = processor

    def encode(self, rows: Sequence[Any]) -> list[Sample | ValueError]:
        results: list[Any] = [None] * len(rows)
        for i, row in enumerate(rows):
            try:
                if isinstance(row, Mapping):
                    results[i] = self._encode_with_images(row)
            except Exception as error:  # a processor may raise anything
                results[i] = as_value_error(error)
        others = [i for i, result in enumerate(results) if result is None]
        for i, sample in zip(others, super().encode([rows[i] for i in others]), strict=True):
            is_read = isinstance(sample, Sample)
            if is_read and (sample.tokens == self.processor.image_token_id).any():
                sample = ValueError(f"a {self.processor.image_token} in the row has no image")
            results[i] = sample
        return results

    def _encode_with_images(self, row: Mapping) -> Sample | ValueError | None:
        """Return the sample of a row with images or messages; None for other rows."""
        column = row.get("images")
        row = row if self.format is None else self.format(row)
        is_chat = "messages" in row or isinstance(row.get("prompt"), list)
        if "input_ids" in row or not (is_chat or _as_list(column)):
            return None
        row, images = _take_images(row, _as_list(column))
        reader = copy.copy(self)
        reader.format = reader.text_encoder = None
        reader.tokenizer = tokenizer = ImageTokenizer(self.processor, images)
        (sample,) = Encoder.encode(reader, [row])
        if not images or not isinstance(sample, Sample):
            return sample
        labels = np.where(tokenizer.is_image(len(sample)), IGNORE_INDEX, sample.labels)
        if not (labels != IGNORE_INDEX).any():
            raise ValueError("the row has images but no text to train on: no labels are left")
        return replace(sample, labels=labels, images=tokenizer.sample_images(len(sample)))


class ImageTokenizer:
    """A tokenizer for the text of one row, which replaces placeholders by the tokens of images.

    Offsets refer to the text with placeholders, so that labels are found as in text alone.
    """

    is_fast = True

    def __init__(self, processor: Any, images: Sequence[Any]):
        self.processor, self.images = processor, tuple(images)
        self.chat_template = getattr(processor, "chat_template", None)
        self.chat_template = self.chat_template or processor.tokenizer.chat_template
        self._text, self._special_tokens = "", True
        self._is_image = np.zeros(0, bool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processor.tokenizer, name)

    def apply_chat_template(self, messages: list, *, tokenize: bool, **options: Any) -> Any:
        options["chat_template"] = self.chat_template
        if tokenize and not self.images:
            return self.processor.tokenizer.apply_chat_template(messages, tokenize=True, **options)
        if not tokenize:
            return self.processor.apply_chat_template(messages, tokenize=False, **options)
        raise ValueError(
            "labels of chats with images are found by the rendered text: use a chat template "
            "without generation markers"
        )

    def __call__(self, text: Any, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Tokenize one text."""
        is_batch = not isinstance(text, str)
        self._text, self._special_tokens = text[0] if is_batch else text, add_special_tokens
        found = process(
            self.processor, self._text, self.images, add_special_tokens,
            return_offsets_mapping=True, return_text_replacement_offsets=True,
        )  # fmt: skip
        ids, offsets = found["input_ids"][0], np.array(found["offset_mapping"][0]).reshape(-1, 2)
        replaced = (found.get("text_replacement_offsets") or [[]])[0]
        offsets, self._is_image = _original_offsets(offsets, replaced)
        return {
            "input_ids": [ids] if is_batch else ids,
            "offset_mapping": [offsets.tolist()] if is_batch else offsets,
        }

    def is_image(self, num_tokens: int) -> np.ndarray:
        """bool [T]: which tokens of the last text stand for images; an eos may follow them."""
        return np.pad(self._is_image, (0, num_tokens - len(self._is_image)))

    def sample_images(self, num_tokens: int) -> SampleImages:
        """Return the images with the last text."""
        return SampleImages(
            self.processor,
            self._text,
            self.images,
            num_tokens=num_tokens,
            text_tokens=len(self._is_image),
            special_tokens=self._special_tokens,
        )


def image_sample(processor: Any, text: str, images: Sequence[Any]) -> Sample:
    """Return the sample of a text with a placeholder for each image."""
    tokenizer = ImageTokenizer(processor, images)
    ids = tokenizer(text)["input_ids"]
    return Sample(ids, images=tokenizer.sample_images(len(ids)) if images else None)


def _original_offsets(offsets: np.ndarray, replaced: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Return the characters of each token before placeholders were replaced, and which are images.

    Tokens of an image have no characters.

    >>> replaced = [{"span": (1, 2), "new_span": (1, 4)}]
    >>> _original_offsets(np.array([[0, 1], [1, 3], [3, 4], [4, 6]]), replaced)[0].tolist()
    [[0, 1], [1, 1], [1, 1], [2, 4]]
    """
    original, is_image = offsets.copy(), np.zeros(len(offsets), bool)
    for place in replaced:
        (begin, end), (new_begin, new_end) = place["span"], place["new_span"]
        inside = (offsets[:, 0] < new_end) & (offsets[:, 1] > new_begin)
        after = offsets[:, 0] >= new_end
        original[inside], is_image[inside] = begin, True
        original[after] = offsets[after] - new_end + end
    return original, is_image


def _take_images(row: Mapping, column: list[Any]) -> tuple[dict, list[Any]]:
    """Return a row with bare image parts, and its images in the order of their places."""
    row, places = {key: row[key] for key in row if key != "images"}, iter(column)
    images: list[Any] = []
    for name in ("messages", "prompt", "completion"):
        if isinstance(row.get(name), list | tuple):
            row[name] = [_without_images(message, images, places) for message in row[name]]
    return row, [*images, *places]


def _without_images(message: Any, images: list[Any], column: Iterator[Any]) -> Any:
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list | tuple):
        return message
    bare = []
    for part in parts:
        if part["type"] in IMAGE_PARTS:
            own = [part[key] for key in REFERENCES if part.get(key) is not None]
            images += own[:1] or islice(column, 1)
            bare.append({"type": "image"})
        elif part["type"] == "text":
            bare.append({"type": "text", "text": part["text"]})
        else:
            raise ValueError(f"a message has a part of type {part['type']!r}: pass text and images")
    return {**message, "content": bare}


def _as_list(images: Any) -> list[Any]:
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]
