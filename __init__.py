"""nopad: sequence packing for training and an inference engine for evaluation, without padding.

    from nopad import PackedDataset, PackedCollator, PackedTrainer, Engine, SamplingParams

Names are loaded on first use, each from its sub-package; `import nopad` itself loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collators import PackedCollator, PaddedCollator, PreferenceCollator
    from .inference import Completion, DataParallelEngine, Engine, SamplingParams
    from .packing import Pack, PackedDataset, Packer, Sample, pack_lengths
    from .trainer import (
        Example,
        GenerationEval,
        attach_loss,
        compile_layers,
        offload_checkpoints,
        preference_log_probs,
    )
    from .trainer.with_accelerate import AccelerateEval, PackedAccelerateLoader
    from .trainer.with_hf import PackedSFTTrainer, PackedTrainer, PackedTrainerMixin
    from .trainer.with_lightning import PackedCallback, PackedDataModule

__version__ = "0.1.0"

__all__ = [
    "AccelerateEval",
    "Completion",
    "DataParallelEngine",
    "Engine",
    "Example",
    "GenerationEval",
    "Pack",
    "PackedAccelerateLoader",
    "PackedCallback",
    "PackedCollator",
    "PackedDataModule",
    "PackedDataset",
    "PackedSFTTrainer",
    "PackedTrainer",
    "PackedTrainerMixin",
    "Packer",
    "PaddedCollator",
    "PreferenceCollator",
    "Sample",
    "SamplingParams",
    "__version__",
    "attach_loss",
    "compile_layers",
    "offload_checkpoints",
    "pack_lengths",
    "preference_log_probs",
]

_ROOMS = {
    "packing": ("Pack", "PackedDataset", "Packer", "Sample", "pack_lengths"),
    "collators": ("PackedCollator", "PaddedCollator", "PreferenceCollator"),
    "inference": ("Completion", "DataParallelEngine", "Engine", "SamplingParams"),
    "trainer": (
        "Example",
        "GenerationEval",
        "attach_loss",
        "compile_layers",
        "offload_checkpoints",
        "preference_log_probs",
    ),
    "trainer.with_accelerate": ("AccelerateEval", "PackedAccelerateLoader"),
    "trainer.with_hf": ("PackedSFTTrainer", "PackedTrainer", "PackedTrainerMixin"),
    "trainer.with_lightning": ("PackedCallback", "PackedDataModule"),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}
_EXTRAS = {
    "PackedSFTTrainer": ("trl",),
    "PackedCallback": ("lightning", "pytorch_lightning"),
    "PackedDataModule": ("lightning", "pytorch_lightning"),
}
"""Names that need one of these libraries: `import *` omits them where all are missing."""
__all__ = [name for name in __all__ if name not in _EXTRAS or any(map(find_spec, _EXTRAS[name]))]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
