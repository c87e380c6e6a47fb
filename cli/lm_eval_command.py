"""`nopad lm_eval`: lm_eval's own command line, with the engine among its models as `nopad`.

    nopad lm_eval --model nopad --model_args pretrained=path/to/checkpoint --tasks arc_easy

Everything lm_eval offers (--log_samples, --gen_kwargs, --wandb_args ...) is there; `nopad eval` is
the short way, and the one for several processes. In Python, importing this module is enough for
`lm_eval.simple_evaluate(model="nopad", model_args={"pretrained": ...})`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

try:
    from lm_eval import models as _theirs  # noqa: F401
    from lm_eval.api.registry import register_model
except ImportError:
    raise ImportError("lm-eval is not installed: pip install 'nopad[eval]'") from None

from ..inference.harness import EngineLM
from .checkpoints import checkpoint_path, load_model, load_tokenizer


@register_model("nopad")
class CheckpointLM(EngineLM):
    """A checkpoint by its name, as lm_eval's command line gives it."""

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        max_length: int | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **settings: Any,
    ):
        """settings: of the engine, which makes its batches itself: their sizes mean nothing."""
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None  # lm_eval says so where the user said nothing
        name = checkpoint_path(pretrained)
        words = load_tokenizer(tokenizer or name)
        model = load_model(name, dtype, device)
        super().__init__(model, words, max_length=max_length, **settings)


def main(argv: list[str]) -> int:
    """Hand over to lm_eval; return the exit status."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("lm_eval's own command runs in one process: use `nopad eval` for several")
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *argv]
    cli_evaluate()
    return 0
