"""TRL's SFTTrainer on packs of documents."""

from __future__ import annotations

from trl.trainer.sft_trainer import SFTTrainer

from ..with_hf.trainer import PackedTrainerMixin


class PackedSFTTrainer(PackedTrainerMixin, SFTTrainer):
    """TRL's SFTTrainer with packs; the arguments are those of `PackedTrainerMixin`."""
