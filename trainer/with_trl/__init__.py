"""TRL's trainers without padding, and rollouts from the model in training.

The names need TRL, so they are loaded when they are used, and `import *` omits them without TRL.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .packed_model import PackedModelMixin
    from .preference_trainers import PackedDPOTrainer, PackedKTOTrainer, PackedRewardTrainer
    from .rollouts import LiveGRPOTrainer, LiveRLOOTrainer, LiveRolloutMixin
    from .sft_trainer import PackedSFTTrainer

__all__ = [
    "LiveGRPOTrainer",
    "LiveRLOOTrainer",
    "LiveRolloutMixin",
    "PackedDPOTrainer",
    "PackedKTOTrainer",
    "PackedModelMixin",
    "PackedRewardTrainer",
    "PackedSFTTrainer",
]
_MODULES = {
    "packed_model": ("PackedModelMixin",),
    "preference_trainers": ("PackedDPOTrainer", "PackedKTOTrainer", "PackedRewardTrainer"),
    "rollouts": ("LiveGRPOTrainer", "LiveRLOOTrainer", "LiveRolloutMixin"),
    "sft_trainer": ("PackedSFTTrainer",),
}
if find_spec("trl") is None:
    __all__ = [name for name in __all__ if name not in sum(_MODULES.values(), ())]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            try:
                return getattr(import_module(f".{module}", __name__), name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "trl":
                    raise
                raise ImportError("trl is not installed: pip install trl") from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
