"""`nopad doctor MODEL`: does a model keep packed documents apart, under each kind of attention?

    nopad doctor path/to/checkpoint          its own weights
    nopad doctor path/to/config.json         a small model of that config
    nopad doctor llama --attn nopad,sdpa     a small model of that type
    nopad doctor llama --parity           does generation compute what training computes?

Every implementation that runs here gets the same pack and is held against the documents run one by
one: logits, loss, gradients, and whether a document moves when the one before it is exchanged. Exit
status: 0 all that ran here are apart, 1 some implementation leaks or is wrong, 2 nothing could be
examined: the model cannot be read or built, or none of the implementations serves it here.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .checkpoints import has_weights, quiet_bars, resolve_path, short_error
from .options import attention_name, parser

IMPLEMENTATIONS = "nopad,flash_attention_2,sdpa,eager,flex_attention"
MOST_PARAMETERS = 50_000_000
"""A shrunk model beyond it was not shrunk: to build it would fill the memory."""


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    options = _options(argv)
    names = [name.strip() for name in options.attn.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--attn {options.attn!r} names no attention implementation")
    with _quiet():
        try:
            for name in names:
                attention_name(name)
        except argparse.ArgumentTypeError as unknown:
            raise ValueError(f"--attn {unknown}") from None
        try:
            model, given = load(options.model, options.tiny)
        except Exception as error:  # a config or checkpoint can fail anywhere in Transformers
            reason = f"cannot build {options.model}: {short_error(error)}"
            print(f"nopad doctor: {reason}", file=sys.stderr)
            return 2
        look = _agreement if options.compare_logprobs else partial(_apartness, names, given)
        return look(options.model, model)


def _apartness(names: list[str], given: Any, name: str, model: Any) -> int:
    """Print which implementations keep documents apart; 1 where one does not, 2 where none ran."""
    from .isolation import check_isolation, report

    findings = [check_isolation(model, each, given) for each in names]
    print(report(name, model, findings))
    if not any(finding.examined for finding in findings):
        return 2
    return int(any(finding.bad for finding in findings))


def _options(argv: list[str]) -> argparse.Namespace:
    made = parser("doctor", __doc__)
    add = made.add_argument
    add("model", help="a checkpoint folder, a config.json, or a model type")
    add("--attn", default=IMPLEMENTATIONS, help="which, by commas")
    add("--tiny", action="store_true", help="shrink the model, with random weights")
    add("--parity", action="store_true", help="compare generation with training, by dtype")
    return made.parse_args(argv)


def _agreement(name: str, model: Any) -> int:
    """Print how far generation and training lie apart; 1 where it is more than rounding.

    It is 1 as well where the backend that runs everywhere did not, or none; 2 for a model refused.
    """
    from ..attention import unsupported_reason
    from .logprob_parity import rows, table

    reason = unsupported_reason(model)
    if reason is not None:
        print(f"{name}: refused: {reason}")
        return 2
    made = list(rows(model))
    print(table(name, made))
    return int(any(row.bad for row in made) or all(row.found is None for row in made))


def load(name: str, tiny: bool) -> tuple[Any, Any]:
    """The model, with eager attention, in fp32, on the GPU if there is one; and its own config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    place = resolve_path(name)
    kind = {"attn_implementation": "eager", "dtype": torch.float32}
    by_type = name in CONFIG_MAPPING and not Path(place).exists()
    config = CONFIG_MAPPING[name]() if by_type else AutoConfig.from_pretrained(place)
    if tiny or by_type or not has_weights(place):
        model = _small(config, kind)
    else:
        model = AutoModelForCausalLM.from_pretrained(place, **kind)
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    return model.eval().to(device), config


def _small(config: Any, kind: dict[str, Any]) -> Any:
    """A small model of that config with random weights; counted first where it costs no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from .tiny_model import randomize_weights, tiny_config

    with torch.device("meta"):
        trial = AutoModelForCausalLM.from_config(tiny_config(config), **kind)
    size = sum(p.numel() for p in trial.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(
            f"{size:,} parameters even when shrunk, more than {MOST_PARAMETERS:,}: give the folder "
            "of a small checkpoint of that type"
        )
    model = AutoModelForCausalLM.from_config(tiny_config(config), **kind)
    randomize_weights(model)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Let nothing but the findings be said; as loud as before afterwards."""
    from transformers.utils import logging as chatter

    ours, before = logging.getLogger("nopad"), chatter.get_verbosity()
    level = ours.level
    chatter.set_verbosity_error()
    quiet_bars()
    ours.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        chatter.set_verbosity(before)
        ours.setLevel(level)
