"""Check batches against the limits of a model: its vocabulary, classes and positions.

All batches are checked on the host before they are issued: on a device, an id outside the
vocabulary stops the process with an unclear error, and a label outside it gives a loss of NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...attention.hf import SequenceLimit, position_offset, rotary_limit, sequence_limit
from ...packing import IGNORE_INDEX


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The vocabulary of a model, and the longest sequence that a pack may hold; None: any."""

    vocab_size: int
    sequence: SequenceLimit | None = None
    num_classes: int | None = None
    """Of a model with another head than an LM's; None: labels are tokens."""

    @classmethod
    def of(cls, *models: Any) -> ModelLimits:
        """Return the strictest limits of the models."""
        configs = [model.config.get_text_config() for model in models]
        lengths = [limit for limit in map(length_limit, configs) if limit is not None]
        shortest = min(lengths, key=lambda limit: limit.length, default=None)
        heads = [m.config.num_labels for m in models if m.get_output_embeddings() is None]
        return cls(min(config.vocab_size for config in configs), shortest, min(heads, default=None))

    def check(self, batch: dict[str, Any], name: object) -> None:
        """Raise if a batch exceeds the limits; `name` is its pack in the message."""
        self.check_ids(batch, f"{name}: ")
        if self.sequence is None:
            return
        length = int(batch["position_ids"].max()) + 1
        if length > self.sequence.length:
            raise ValueError(
                f"{name} holds a sequence of {length} tokens, beyond {self.sequence.reason}: "
                f"{shorter_samples_advice(self.sequence.length)}"
            )

    def check_ids(self, batch: dict[str, Any], prefix: str = "") -> None:
        """Raise if a token or a label is outside the vocabulary, or a label is not a class."""
        labels = batch["labels"].where(batch["labels"] != IGNORE_INDEX, 0)
        vocabulary = f"vocabulary of {self.vocab_size}: the data was tokenized for another model"
        checks = [("token", batch["input_ids"], self.vocab_size, vocabulary)]
        if self.num_classes is None:
            checks.append(("label", labels, self.vocab_size, vocabulary))
        elif self.num_classes > 1 and not labels.is_floating_point():
            classes = f"{self.num_classes} classes: load it with num_labels="
            checks.append(("label", labels, self.num_classes, classes))
        for name, ids, size, whole in checks:
            if not ids.numel():
                continue
            lowest, highest = (int(limit) for limit in ids.aminmax())
            if lowest < 0 or highest >= size:
                value = lowest if lowest < 0 else highest
                raise ValueError(f"{prefix}{name} {value} is outside the model's {whole}")


def shorter_samples_advice(length: int) -> str:
    """Return how to keep the samples of a dataset within `length` tokens."""
    return (
        f"lower the budget to {length}, or pass PackedDataset(max_length={length}); samples "
        "beyond that need overflow= (split, truncate or drop)"
    )


def length_limit(config: Any) -> SequenceLimit | None:
    """Return the longest sequence that a pack may hold under this attention."""
    is_nopad = getattr(config, "_attn_implementation", None) == "nopad"
    limit = sequence_limit(config) if is_nopad else rotary_limit(config)
    if limit is not None:
        reason = f"the {limit.length} that packs of this model may hold ({limit.reason})"
        limit = limit._replace(reason=reason)
    positions = getattr(config, "max_position_embeddings", None)
    positions = None if positions is None else positions - position_offset(config)
    if positions is None or (limit is not None and limit.length <= positions):
        return limit
    return SequenceLimit(positions, f"the model's {positions} positions", alone=False)
