"""`LabelledEncoder`: rows with labels to samples with targets; `make_encoder`: choose one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..sample import Sample
from ..targets import add_target
from .encoder import Encoder
from .image_encoder import ImageEncoder

SEGMENTS = "token_type_ids"


class LabelledEncoder(Encoder):
    """Encodes rows without their column of labels, which become the targets of the samples.

    >>> encoder = LabelledEncoder(lambda text: [ord(letter) for letter in text], add_eos=False)
    >>> encoder.label_column = "label"
    >>> sample = encoder.encode([{"text": "ab", "label": 1}])[0]
    >>> sample.tokens.tolist(), sample.target
    ([97, 98], 1)
    """

    tokens_suffice = False

    def encode(self, rows: Sequence[Any]) -> list[Sample | ValueError]:
        name = self.label_column
        assert name is not None
        plain = [
            {key: row[key] for key in row if key != name} if isinstance(row, Mapping) else row
            for row in rows
        ]
        return [
            self._labelled(row, sample)
            for row, sample in zip(rows, super().encode(plain), strict=True)
        ]

    def _labelled(self, row: Any, sample: Sample | ValueError) -> Sample | ValueError:
        if isinstance(sample, ValueError) or sample.target is not None:
            return sample
        name = self.label_column
        if not isinstance(row, Mapping) or row.get(name) is None:
            return ValueError(f"the row has no {name!r}, which label_column= names")
        segments = row.get(SEGMENTS)
        if segments is not None and any(segments):
            return ValueError(f"{SEGMENTS} of sentence pairs are not packed: remove the column")
        try:
            return add_target(sample, row[name], str(name))
        except ValueError as error:
            return error


def make_encoder(tokenizer: Any, label_column: str | None, **options: Any) -> Encoder:
    """Return the encoder of rows with labels in a column; None: of rows without.

    tokenizer: or a processor, for rows with images.
    """
    if hasattr(tokenizer, "image_processor"):
        if label_column is not None:
            raise ValueError(
                f"label_column={label_column!r}: heads on models of images are not packed"
            )
        return ImageEncoder(tokenizer, **options)
    if label_column is None:
        return Encoder(tokenizer, **options)
    if not isinstance(label_column, str) or label_column == options["text_column"]:
        raise ValueError(f"label_column={label_column!r}: pass the name of the column of labels")
    encoder = LabelledEncoder(tokenizer, **options)
    encoder.label_column = label_column
    return encoder
