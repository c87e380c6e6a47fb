"""Without a GPU, the Triton kernels are run by Triton's interpreter: that must be said before import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
