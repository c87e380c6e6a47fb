"""Load models and tokenizers by name, with one-line error messages; their code is never run."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from ...runtime import unwrap_peft
from .checkpoint import (
    adapter_error,
    base_model_name,
    checkpoint_path,
    has_tokenizer,
    is_adapter,
    resolve_path,
    short_error,
)

log = logging.getLogger(__name__)


def load_pretrained(name: Any, tokenizer: Any = None, dtype: Any = None) -> tuple[Any, Any]:
    """Load a model and its tokenizer; None for a folder that has no tokenizer.

    tokenizer: another name, or a tokenizer that is returned as it is.
    dtype: of the weights; default: that of the checkpoint.
    """
    path = checkpoint_path(os.fspath(name))
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = load_tokenizer(os.fspath(tokenizer))
    elif tokenizer is None:
        folders = [path, base_model_name(path)] if is_adapter(path) else [path]
        tokenizer = load_tokenizer(path) if any(map(has_tokenizer, folders)) else None
    return load_model(path, "auto" if dtype is None else dtype), tokenizer


def load_model(name: str, dtype: Any = "auto", device: str | None = None) -> Any:
    """Load a causal LM from a folder or the hub, in eval mode on its device."""
    target = choose_device(device)
    hide_progress_bars()
    path = checkpoint_path(name)
    try:
        model = load_weights(path, dtype=dtype)
    except Exception as error:  # Transformers and the hub raise many types
        reason = adapter_error(path, error) if is_adapter(path) else short_error(error)
        raise ValueError(f"cannot load {name}: {reason}") from None
    if is_adapter(path):
        log.warning(
            "%s is an adapter on %s and runs beside its weights; to merge it: AutoPeftModelFor"
            "CausalLM.from_pretrained(%r).merge_and_unload().save_pretrained(FOLDER)",
            name, base_model_name(path), name,
        )  # fmt: skip
    return model.to(target).eval()


def load_weights(path: str, merge: bool = False, **options: Any) -> Any:
    """Load a causal LM; raise if weights are missing, which Transformers fills at random.

    merge: add an adapter to the weights of its base model instead of running it beside them.
    """
    from transformers import AutoModelForCausalLM

    if is_adapter(path):
        return _load_adapter(path, load_weights(base_model_name(path), merge, **options), merge)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        **options,
    )
    model, info = loaded
    if mismatched := sorted(info["mismatched_keys"]):
        name, saved, wanted = mismatched[0]
        raise ValueError(
            f"{len(mismatched)} of its weights have other shapes than its config.json says, such "
            f"as {name}: {list(saved)} instead of {list(wanted)}"
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{len(missing)} of its weights are missing and would be random, such as {missing[0]}: "
            "the checkpoint does not belong to its config.json"
        )
    return model


def _load_adapter(path: str, base: Any, merge: bool) -> Any:
    """Add an adapter to its base model; raise if weights of the adapter are missing.

    PEFT loads it: Transformers does not find all weights of DoRA, nor tokens of tied embeddings.
    """
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        try:  # adapters in the dtype of the model, not in float32
            model = PeftModel.from_pretrained(base, path, autocast_adapter_dtype=False)
        except UserWarning as missing:
            raise ValueError(f"weights of the adapter would be random: {missing}") from None
    adapted = unwrap_peft(model)  # before merging: it refuses prompt tuning, which cannot be merged
    return model.merge_and_unload() if merge else adapted


def load_tokenizer(name: str, **settings: Any) -> Any:
    """Load a tokenizer from a folder or the hub; settings: of the tokenizer, as `add_bos_token`."""
    from transformers import AutoTokenizer

    path = resolve_path(name)
    if Path(path).is_file():
        raise ValueError(f"{name} is a file: pass the folder of a tokenizer as tokenizer=")
    source = path
    if is_adapter(path) and not has_tokenizer(path):
        source = base_model_name(path)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **settings)
    except Exception as error:
        if source != path and not Path(source).is_dir():
            reason = adapter_error(path, error)
        elif "trust_remote_code" in str(error):
            reason = f"{short_error(error)}; pass another as tokenizer="
        elif Path(path).is_dir():
            is_there = "instantiate" not in str(error)  # otherwise there are no files of one
            why = f" ({short_error(error).rstrip('.')})" if is_there else ""
            reason = f"has no readable tokenizer{why}; pass one as tokenizer="
        else:
            reason = f"{short_error(error).rstrip('.')}; there is no folder {name} here either"
        raise ValueError(f"{name}: {reason}") from None


def choose_device(name: str | None) -> Any:
    """Return the device and make it current; each process of a launcher gets its own GPU."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if num_gpus else "cpu"))
    except RuntimeError:
        raise ValueError(f"device={name}: pass cpu, cuda, cuda:1 ...") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        return _other_device(device)
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= num_gpus:
        raise ValueError(f"device=cuda:{index}: this machine has {num_gpus} CUDA devices")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)  # kernels run on the current device, not on that of their data
    return device


def _other_device(device: Any) -> Any:
    """Return a device that is neither a CPU nor CUDA, if this machine has it."""
    import torch

    try:
        torch.zeros(1, device=device).add(1).item()
    except (RuntimeError, AssertionError):
        message = f"device={device}: this machine cannot use it; pass cpu, cuda, cuda:1 ..."
        raise ValueError(message) from None
    return device


def hide_progress_bars() -> None:
    """Hide Transformers' progress bars unless stderr is a terminal."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
