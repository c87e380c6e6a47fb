"""`nopad doctor MODEL`: does a model keep packed documents apart, under each kind of attention?

    nopad doctor path/to/checkpoint          its own weights
    nopad doctor path/to/config.json         a small model of that config
    nopad doctor llama --attn nopad,sdpa     a small model of that type
    nopad doctor llama --agreement           does generation compute what training computes?

Every implementation that runs here gets the same pack and is held against the documents run one by
one: logits, loss, gradients, and whether a document moves when the one before it is exchanged. Exit
status: 0 all apart, 1 some implementation leaks or is wrong, 2 the model could not be read.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .asking import parser
from .loading import first_line, quiet_bars

IMPLEMENTATIONS = "nopad,flash_attention_2,sdpa,eager,flex_attention"


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    options = _options(argv)
    names = [name.strip() for name in options.attn.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--attn {options.attn!r} names no attention implementation")
    with _quiet():
        try:
            model = load(options.model, options.tiny)
        except (OSError, ValueError, KeyError) as error:
            reason = f"cannot build {options.model}: {first_line(error)}"
            print(f"nopad doctor: {reason}", file=sys.stderr)
            return 2
        look = _agreement if options.agreement else partial(_apartness, names)
        return look(options.model, model)


def _apartness(names: list[str], name: str, model: Any) -> int:
    """Print which implementations keep documents apart; 1 where one does not."""
    from .apartness import examine, report

    findings = [examine(model, each) for each in names]
    print(report(name, model, findings))
    return int(any(finding.bad for finding in findings))


def _options(argv: list[str]) -> argparse.Namespace:
    made = parser("doctor", __doc__)
    add = made.add_argument
    add("model", help="a checkpoint folder, a config.json, or a model type")
    add("--attn", default=IMPLEMENTATIONS, help="which, by commas")
    add("--tiny", action="store_true", help="shrink the model, with random weights")
    add("--agreement", action="store_true", help="compare generation with training, by dtype")
    return made.parse_args(argv)


def _agreement(name: str, model: Any) -> int:
    """Print how far generation and training lie apart; 1 where it is more than rounding.

    It is 1 as well where the backend that runs everywhere did not, or none.
    """
    from ..attention import why_refused
    from .agreeing import rows, table

    reason = why_refused(model)
    if reason is not None:
        print(f"{name}: refused: {reason}")
        return 0
    made = list(rows(model))
    print(table(name, made))
    return int(any(row.bad for row in made) or all(row.found is None for row in made))


def load(name: str, tiny: bool) -> Any:
    """The model, with eager attention, in fp32, on the GPU if there is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from .shrink import scramble, shrink

    path = Path(os.path.expanduser(name))
    if not path.exists() and (path.suffix == ".json" or name.startswith(("/", ".", "~"))):
        raise OSError("there is no such file or folder")
    place = path if path.exists() else name
    kind = {"attn_implementation": "eager", "dtype": torch.float32}
    if not path.exists() and name in CONFIG_MAPPING:
        config, tiny = CONFIG_MAPPING[name](), True
    else:
        config = AutoConfig.from_pretrained(place)
        folder = path if path.is_dir() else path.parent
        weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
        tiny = tiny or (path.exists() and (path.is_file() or not weights))
    if tiny:
        model = AutoModelForCausalLM.from_config(shrink(config), **kind)
        scramble(model)
    else:
        model = AutoModelForCausalLM.from_pretrained(place, **kind)
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    return model.eval().to(device)


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
