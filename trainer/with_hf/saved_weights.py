"""Load the weights of a checkpoint that Transformers has saved in the layout of the hub.

    save_pretrained     experts.gate_up_proj  ─▶  experts.0.w1, experts.0.w3, experts.1.w1, ...
    stock Trainer       load_state_dict(strict=False): the experts keep the weights they have

The stock Trainer saves by the one and loads by the other, when it resumes a run and when it loads
the best model. Weights that it could not place are loaded by `from_pretrained`, which converts.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch


def load_converted(model: Any, folder: str, missing: list[str]) -> None:
    """Load the weights of a checkpoint into a model; raise if some are not in it.

    missing: names that the checkpoint does not have in the layout of the model.
    """
    tied = set(model.all_tied_weights_keys)
    if not set(missing) - tied:
        return
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    saved, found = type(model).from_pretrained(
        folder,
        config=model.config,
        dtype=reduce(torch.promote_types, dtypes),
        output_loading_info=True,
    )
    if absent := sorted(found["missing_keys"]):
        raise ValueError(
            f"{folder} lacks {len(absent)} weights of the model, such as {absent[0]}: it was saved "
            "from another one"
        )
    model.load_state_dict(saved.state_dict())
