"""TRL's DPO, KTO and reward trainers without padding, called as TRL's are."""

from __future__ import annotations

from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

from .packed_model import PackedModelMixin


class PackedDPOTrainer(PackedModelMixin, DPOTrainer):
    """TRL's DPOTrainer without padding; the arguments are those of `PackedModelMixin`."""


class PackedKTOTrainer(PackedModelMixin, KTOTrainer):
    """TRL's KTOTrainer without padding; the arguments are those of `PackedModelMixin`."""


class PackedRewardTrainer(PackedModelMixin, RewardTrainer):
    """TRL's RewardTrainer without padding; the arguments are those of `PackedModelMixin`."""
