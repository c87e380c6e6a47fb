"""TRL's SFTTrainer on packs; the one module that imports TRL, loaded when its class is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .trainer import PackedTrainerMixin

if TYPE_CHECKING:
    from trl.trainer.sft_trainer import SFTTrainer
else:
    try:
        from trl import SFTTrainer
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ImportError("trl is not installed: pip install trl") from None


class PackedSFTTrainer(PackedTrainerMixin, SFTTrainer):
    """TRL's SFTTrainer with packs; the arguments are those of `PackedTrainerMixin`."""
