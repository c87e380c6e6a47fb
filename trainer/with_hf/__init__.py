"""HF Trainer and trainers derived from it, TRL's among them: packs, loss, evaluation, signals.

`PackedSFTTrainer` needs TRL, so it is loaded when it is used, and `import *` omits it without TRL.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .evaluation import EvalCallback, ServeCallback
from .intact_checkpoints import StopCallback
from .trainer import PackedTrainer, PackedTrainerMixin

if TYPE_CHECKING:
    from ..with_trl import PackedSFTTrainer

__all__ = [
    "EvalCallback",
    "PackedSFTTrainer",
    "PackedTrainer",
    "PackedTrainerMixin",
    "ServeCallback",
    "StopCallback",
]
if find_spec("trl") is None:
    __all__ = [name for name in __all__ if name != "PackedSFTTrainer"]


def __getattr__(name: str) -> Any:
    if name == "PackedSFTTrainer":
        from ..with_trl import PackedSFTTrainer

        return PackedSFTTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
