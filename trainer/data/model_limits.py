"""What a model can take: token ids and labels of its vocabulary, and so many positions.

Batches are checked on the host before they are issued, all of them: on a device an id outside the
vocabulary stops the process without a name, and a label outside it gives a loss of NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...packing import IGNORE_INDEX


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The vocabulary and the positions of a model; None for positions without a limit."""

    vocab_size: int
    max_positions: int | None = None

    @classmethod
    def of(cls, model: Any) -> ModelLimits:
        config = model.config.get_text_config()
        return cls(config.vocab_size, getattr(config, "max_position_embeddings", None))

    def check(self, batch: dict[str, Any], name: object) -> None:
        """Raise if the model cannot take a batch; `name` is its pack in the message."""
        self.check_ids(batch, f"{name}: ")
        if self.max_positions is None:
            return
        length = int(batch["position_ids"].max()) + 1
        if length > self.max_positions:
            raise ValueError(
                f"{name} holds a sequence of {length} tokens, beyond the model's "
                f"{self.max_positions} positions: lower the budget to {self.max_positions}"
            )

    def check_ids(self, batch: dict[str, Any], prefix: str = "") -> None:
        """Raise if a token or a label is outside the vocabulary."""
        labels = batch["labels"].where(batch["labels"] != IGNORE_INDEX, 0)
        for name, ids in (("token", batch["input_ids"]), ("label", labels)):
            if not ids.numel():
                continue
            lowest, highest = (int(limit) for limit in ids.aminmax())
            if lowest < 0 or highest >= self.vocab_size:
                raise ValueError(
                    f"{prefix}{name} {lowest if lowest < 0 else highest} is outside the model's "
                    f"vocabulary of {self.vocab_size}: the data was tokenized for another model"
                )
