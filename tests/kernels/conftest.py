"""Without a GPU, the Triton kernels are interpreted: to be said before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
