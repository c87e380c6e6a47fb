"""`nopad lm_eval`: lm_eval's own command line, with the engine among its models as `nopad`.

    nopad lm_eval --model nopad --model_args pretrained=path/to/checkpoint --tasks arc_easy

All of lm_eval's options (--log_samples, --gen_kwargs, --wandb_args ...) are available; `nopad eval`
is shorter, and runs in several processes. In Python, importing this module registers the model for
`lm_eval.simple_evaluate(model="nopad", model_args={"pretrained": ...})`.
"""

from __future__ import annotations

import os
import sys
from inspect import signature
from typing import Any

import torch

try:
    from lm_eval import models as _models  # noqa: F401  (registers lm_eval's own models first)
    from lm_eval.api.registry import register_model
except ImportError:
    raise ImportError("lm-eval is not installed: pip install 'nopad[eval]'") from None

from ..inference import Engine
from ..inference.harness import EngineLM
from .load_pretrained import checkpoint_path, load_model, load_tokenizer


@register_model("nopad")
class CheckpointLM(EngineLM):
    """A checkpoint by name, as lm_eval's command line gives it."""

    def __init__(
        self,
        pretrained: str | None = None,
        tokenizer: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **settings: Any,
    ):
        """Load the checkpoint; settings: those of `Engine`, which ignores lm_eval's batch sizes."""
        if pretrained is None:
            raise ValueError("model_args: pass pretrained=, the folder or name of a checkpoint")
        if unknown := [name for name in settings if name not in signature(Engine).parameters]:
            raise ValueError(f"model_args: {unknown[0]!r} is no argument of `nopad` or `Engine`")
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None  # lm_eval's default
        name = checkpoint_path(pretrained)
        special = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
        loaded_tokenizer = load_tokenizer(tokenizer or name, **special)
        model = load_model(name, dtype, device)
        super().__init__(
            model, loaded_tokenizer, max_length=max_length, add_bos_token=add_bos_token, **settings
        )


def main(argv: list[str]) -> int:
    """Run lm_eval's command line; return the exit status."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("lm_eval's own command runs in one process: use `nopad eval` for several")
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["lm_eval", *argv]  # it takes no other argument list
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0
