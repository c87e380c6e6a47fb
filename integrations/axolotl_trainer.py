"""`NopadTrainer`: Axolotl's trainer with `PackedTrainerMixin`, as the Axolotl plugin uses it."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from axolotl.core.trainers import AxolotlTrainer

from ..trainer.with_hf import PackedTrainerMixin


class NopadTrainer(PackedTrainerMixin, AxolotlTrainer):
    """Axolotl's trainer on packs of `sequence_len * micro_batch_size` tokens."""

    def __init__(self, model: Any, args: Any, **kwargs: Any):
        """Take the arguments that Axolotl's builder passes."""
        budget = args.max_seq_length * args.per_device_train_batch_size
        args = copy(args)
        args.per_device_train_batch_size = 1
        # Axolotl 0.21 sets non_blocking, for batches that the accelerator copies; packs are not.
        args.accelerator_config = replace(args.accelerator_config, non_blocking=False)
        super().__init__(model, args, budget=budget, **kwargs)
