"""Continuous batching in pure integers and NumPy: plan steps, lay them out, loop over them."""

from .loop import OutOfMemory, StepLoop
from .scheduler import Scheduler, SchedulerOutput
from .step import BatchParams, Step, StepOutput, build_step

__all__ = [
    "BatchParams",
    "OutOfMemory",
    "Scheduler",
    "SchedulerOutput",
    "Step",
    "StepLoop",
    "StepOutput",
    "build_step",
]
