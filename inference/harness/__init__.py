"""lm-evaluation-harness tasks through the engine."""

from .tasks import EngineLM, Harness, find_tasks

__all__ = [
    "EngineLM",
    "Harness",
    "find_tasks",
]
