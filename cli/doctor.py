"""`nopad doctor MODEL`: do packed documents leak, does generation match training, do ranks agree?

    nopad doctor path/to/checkpoint          check its own weights
    nopad doctor path/to/config.json         check a tiny model of that config
    nopad doctor llama --attn nopad,sdpa     check a tiny model of that type
    nopad doctor llama --parity              compare generation with training
    torchrun --nproc-per-node 8 -m nopad doctor --distributed     compare the ranks of a run

Every attention implementation that runs on this machine gets the same pack, and its results are
compared with those of the documents one by one: logits, loss, gradients, and whether a gradient
reaches another document. The last lines say where each may be used: in your own loop, in
nopad's Engine, and in nopad's trainers, which repair the masks of stock attention.
A tiny model has every kind of layer in its config or, without a config, every kind its type can
have; the last line names kinds that are missing.
Encoders are checked as masked LMs, checkpoints of classifiers with their head, and checkpoints of
vision-language models with images.
Exit status: 0 if every implementation that ran is isolated, 1 if one leaks or is wrong in your
own loop or in the Engine, 2 if nothing could be checked because the model is refused, cannot be
loaded or built, or no implementation runs it here. With status 1, nopad's trainers may still be
right: see their line.

--distributed needs no model: in under a minute, packs, resume, losses and gradients of DDP, FSDP2,
sequence and tensor parallelism, and generation are compared across the ranks that a launcher starts
(torchrun, accelerate launch).
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .load_pretrained import (
    checkpoint_path,
    has_weights,
    hide_progress_bars,
    is_adapter,
    load_weights,
    resolve_path,
    short_error,
)
from .options import attention_name, parser
from .terminal import console, printable, progress

IMPLEMENTATIONS = "nopad,flash_attention_2,sdpa,eager,flex_attention"


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    args = _parse_args(argv)
    if args.distributed:
        with _quiet():
            return _report_distributed(args)
    if args.model is None:
        raise ValueError(
            "MODEL is missing: pass a checkpoint, a config.json or a type such as llama"
        )
    if args.parity and args.attn is not None:
        raise ValueError("--attn has no effect with --parity, which compares backends of nopad")
    args.attn = IMPLEMENTATIONS if args.attn is None else args.attn
    names = list(dict.fromkeys(name.strip() for name in args.attn.split(",") if name.strip()))
    if not names:
        raise ValueError(f"--attn {args.attn!r} names no attention implementation")
    with _quiet():
        try:
            for name in names:
                attention_name(name)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--attn {error}") from None
        if not args.parity and (head := _other_head(args.model, args.tiny)) is not None:
            return head()
        try:
            model, config, lacks = _load(args.model, args.tiny)
        except Exception as error:  # a config or checkpoint can fail anywhere in Transformers
            message = f"cannot build {args.model}: {short_error(error)}"
            print(printable(f"nopad doctor: {message}"), file=sys.stderr)
            return 2
        if args.parity:
            return _report_parity(args.model, model, lacks)
        status = _report_isolation(args.model, model, names, config, lacks)
        return max(status, _report_images(args.model, config, args.tiny))


def _parse_args(argv: list[str]) -> argparse.Namespace:
    command = parser("doctor", "MODEL [options]", __doc__)
    add = command.add_argument
    add(
        "model",
        nargs="?",
        help="checkpoint folder, config.json, hub name or model type such as llama",
    )
    add("--attn", help="attention implementations, separated by commas; default: "
        f"{IMPLEMENTATIONS}")  # fmt: skip
    add("--tiny", action="store_true", help="check a tiny random model of the same config")
    add("--parity", action="store_true",
        help="compare log-probabilities of generation and training")  # fmt: skip
    add("--distributed", action="store_true",
        help="compare the ranks that a launcher has started")  # fmt: skip
    return command.parse_args(argv)


def _report_distributed(args: argparse.Namespace) -> int:
    """Compare the ranks of a launcher; return the exit status."""
    given = {"a model": args.model, "--attn": args.attn, "--tiny": args.tiny,
             "--parity": args.parity}  # fmt: skip
    for name, value in given.items():
        if value:
            raise ValueError(f"{name} has no effect with --distributed, which builds its own model")
    from .doctor_distributed import main as compare_ranks

    return compare_ranks()


def _report_isolation(
    name: str, model: Any, implementations: list[str], config: Any, lacks: list[str]
) -> int:
    """Print which implementations isolate documents; return the exit status."""
    from .doctor_isolation import check_isolation, report

    with progress("checking attention", len(implementations)) as advance:
        results = []
        for each in implementations:
            results.append(check_isolation(model, each, config))
            advance(1)
    report(console(), name, model, results, lacks)
    if not any(result.was_checked for result in results):
        return 2
    return int(any(result.is_bad or result.engine_fault for result in results))


def _report_parity(name: str, model: Any, lacks: list[str]) -> int:
    """Print how far generation is from training; return the exit status.

    The status is 1 if a difference exceeds rounding, if the backend that runs everywhere failed, or
    if none ran; 2 for an unsupported model.
    """
    from ..attention import unsupported_reason
    from .doctor_isolation import not_examined
    from .doctor_parity import measure, report

    reason = unsupported_reason(model, states=True)
    if reason is not None:
        print(printable(f"{name}: refused: {reason}"))
        return 2
    with progress("comparing generation and training") as advance:
        rows = []
        for row in measure(model):
            rows.append(row)
            advance(1)
    report(console(), name, rows)
    for line in not_examined(lacks):
        console().print(printable(line), style="bold red")
    return int(any(row.is_bad for row in rows) or all(row.parity is None for row in rows))


def _report_images(name: str, config: Any, tiny: bool) -> int:
    """Print whether the images of a causal LM that takes them are right; return the exit status."""
    from .doctor_images import has_processor, image_class, report_images

    kind, path = image_class(config), resolve_path(name)
    if kind is None:
        return 0
    if tiny or not has_processor(path):  # it may train on text alone
        report_images(name, kind, None)
        return 0
    return report_images(name, kind, path)


def _other_head(name: str, tiny: bool) -> Callable[[], int] | None:
    """Return the check of an encoder, a classifier or a model of images; None for a causal LM."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from .doctor_heads import head_class, report_head
    from .doctor_images import image_class, report_images

    try:
        path = resolve_path(name)
        is_type = name in CONFIG_MAPPING and not Path(path).exists()
        if is_adapter(path):
            return None
        config = CONFIG_MAPPING[name]() if is_type else _load_config(path)
        kind, sees_images = head_class(config), image_class(config)
    except Exception:  # `_load` raises it again, and says so
        return None
    is_tiny = tiny or is_type or not has_weights(path)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        sees_images = None  # its text is examined first
    if kind is None and sees_images is not None:
        return partial(report_images, name, sees_images, None if is_tiny else path)
    if kind is None:
        return None
    is_tiny |= config.is_encoder_decoder  # refused, whatever its weights
    return partial(report_head, name, kind, config, None if is_tiny else path)


def _load(name: str, tiny: bool) -> tuple[Any, Any, list[str]]:
    """Return a model, its config, and the kinds of layers that a tiny model of it lacks.

    The model is in fp32 with eager attention, on the GPU if there is one.
    """
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    path = resolve_path(name)
    if Path(path).is_dir():
        checkpoint_path(name)
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    is_type = name in CONFIG_MAPPING and not Path(path).exists()
    lacks: list[str] = []
    if is_adapter(path):
        if tiny:
            raise ValueError("it is an adapter, but --tiny needs the config of a model")
        model = load_weights(path, merge=True, **options).requires_grad_()  # PEFT freezes it
        config = model.config
    else:
        config = CONFIG_MAPPING[name]() if is_type else _load_config(path)
        if tiny or is_type or not has_weights(path):
            from .tiny_model import tiny_model

            model, lacks = tiny_model(config, every_kind=is_type, **options)
        else:
            model = load_weights(path, **options)
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.eval().to(device)
    _check_finite(model)
    return model, config, lacks


def _check_finite(model: Any) -> None:
    """Raise if the model's own logits are not finite: no attention could be compared with them."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]], device=model.device), use_cache=False).logits
    if not logits.isfinite().all():
        raise ValueError("its logits are not numbers (NaN or infinite): are its weights damaged?")


def _load_config(path: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence logs and warnings inside the block."""
    from transformers.utils import logging as hf_logging

    logs = [logging.getLogger(name) for name in ("nopad", "torch.distributed.tensor")]
    levels, verbosity = [log.level for log in logs], hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hide_progress_bars()
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
