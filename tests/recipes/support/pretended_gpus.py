"""Run a script on CPU ranks that Accelerate takes for GPUs: it shards on GPUs only.

accelerate launch ... pretended_gpus.py SCRIPT [ARGUMENT...]
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType


def pretend_gpus() -> None:
    """Have every state of Accelerate that finds CPU ranks say GPUs; tensors stay on the CPU."""
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # DDP would want a GPU
    create = PartialState.__init__

    def pretend(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = pretend


if __name__ == "__main__":
    pretend_gpus()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
