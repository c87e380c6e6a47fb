"""lm-evaluation-harness tasks on a live model, through the engine."""

from .engine_lm import EngineLM
from .harness import Harness, find_tasks

__all__ = [
    "EngineLM",
    "Harness",
    "find_tasks",
]
