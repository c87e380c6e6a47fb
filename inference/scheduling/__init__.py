"""Continuous batching in pure integers and NumPy: plan steps, lay them out, loop over them."""

from .loop import Loop, OutOfMemory
from .row_params import RowParams
from .scheduler import Plan, Scheduler
from .step import Step, StepOutput, build_step

__all__ = [
    "Loop",
    "OutOfMemory",
    "Plan",
    "RowParams",
    "Scheduler",
    "Step",
    "StepOutput",
    "build_step",
]
