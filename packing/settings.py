"""The settings that determine the sequence of packs, checked once, for all readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .argument_checks import check_counts, check_flags, check_ints
from .ordering.mixture import StoppingStrategy, Weight, check_stopping_strategy
from .planning.packer import packer_settings

SHUFFLE_BLOCK = 1024
"""Rows that a stream shuffles together by default."""


@dataclass(kw_only=True)
class PackSettings:
    """The user's settings; `PackedDataset` explains them."""

    packer: dict[str, Any]
    """Arguments of a `Packer`."""
    vocab_size: int | None
    weights: list[Weight]
    """One for each source."""
    stopping_strategy: StoppingStrategy
    seed: int
    shuffle: bool | int
    shards: int | None
    pretokenize: bool | None
    balance: bool
    max_packs: int | None
    on_error: Literal["raise", "skip"]

    def __post_init__(self) -> None:
        """Raise for a value that is out of range, even if this source does not use it."""
        if check_ints(budget=self.budget)[0] < 2:
            raise ValueError(f"budget {self.budget}: a pack needs at least 2 tokens to learn from")
        self.packer = packer_settings(**self.packer, vocab_size=self.vocab_size)
        (self.seed,), (self.shards,) = check_ints(seed=self.seed), check_counts(shards=self.shards)
        check_stopping_strategy(self.stopping_strategy)
        check_flags(balance=self.balance, pretokenize=self.pretokenize or False)
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f'on_error {self.on_error!r}: choose "raise" or "skip"')
        if not isinstance(self.shuffle, int | np.integer) or self.shuffle < 0:
            raise ValueError(
                f"shuffle={self.shuffle!r}: pass True, False, or a number of rows to shuffle "
                "together"
            )

    @property
    def budget(self) -> int:
        """Tokens that a pack may hold."""
        return self.packer["budget"]

    @property
    def planner(self) -> dict[str, Any]:
        """Arguments of a `Planner`: those of a packer, except for token values."""
        tokens = ("continue_positions", "pad_token_id")
        return {name: value for name, value in self.packer.items() if name not in tokens}

    @property
    def shuffle_block(self) -> int:
        """Rows that a stream shuffles together."""
        return SHUFFLE_BLOCK if self.shuffle is True else int(self.shuffle)

    @property
    def skips_errors(self) -> bool:
        """Whether rows that cannot be used are skipped and counted."""
        return self.on_error == "skip"
