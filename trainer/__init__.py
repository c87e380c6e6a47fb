"""Packs, the exact loss and evaluation by generation in HF Trainer, TRL, Accelerate and Lightning.

The front ends are separate packages, `nopad.trainer.with_hf`, `.with_accelerate` and
`.with_lightning`, since each needs its library. Importing this package registers
`attn_implementation="nopad"`; the names below are loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..attention import register  # noqa: F401  importing it registers the name "nopad"

if TYPE_CHECKING:
    from .checkpoint_manifest import (
        MANIFEST_NAME,
        check_archive,
        find_manifest,
        latest_intact_archive,
        latest_intact_checkpoint,
        write_manifest,
    )
    from .checkpoint_offload import offload_checkpoints
    from .data.data_state import DataState
    from .data.loader import EvaluationLoader, PackedLoader, PackInfo
    from .evaluation.eval_report import Example
    from .evaluation.generation_eval import GenerationEval
    from .folder_lock import lock_folder
    from .graceful_stop import STOP_SIGNALS, StopRequest
    from .layers import compile_layers
    from .loss.attached_loss import AttachedLoss, attach_loss
    from .loss.cross_entropy import linear_cross_entropy
    from .loss.preference_log_probs import preference_log_probs
    from .monitoring.throughput import ThroughputMeter

__all__ = [
    "MANIFEST_NAME",
    "STOP_SIGNALS",
    "AttachedLoss",
    "DataState",
    "EvaluationLoader",
    "Example",
    "GenerationEval",
    "PackInfo",
    "PackedLoader",
    "StopRequest",
    "ThroughputMeter",
    "attach_loss",
    "check_archive",
    "compile_layers",
    "find_manifest",
    "latest_intact_archive",
    "latest_intact_checkpoint",
    "linear_cross_entropy",
    "lock_folder",
    "offload_checkpoints",
    "preference_log_probs",
    "write_manifest",
]

_MODULES = {
    "checkpoint_manifest": (
        "MANIFEST_NAME",
        "check_archive",
        "find_manifest",
        "latest_intact_archive",
        "latest_intact_checkpoint",
        "write_manifest",
    ),
    "checkpoint_offload": ("offload_checkpoints",),
    "data": ("DataState", "EvaluationLoader", "PackInfo", "PackedLoader"),
    "evaluation": ("Example", "GenerationEval"),
    "folder_lock": ("lock_folder",),
    "graceful_stop": ("STOP_SIGNALS", "StopRequest"),
    "layers": ("compile_layers",),
    "loss": ("AttachedLoss", "attach_loss", "linear_cross_entropy", "preference_log_probs"),
    "monitoring": ("ThroughputMeter",),
}
"""The public names of each module."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
