"""Load models and tokenizers named on the command line, with one-line error messages."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".distcp",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
"""Suffixes of weight files and of their indices, including those that Transformers refuses."""


CONFIGS = ("config.json", "adapter_config.json")
"""What makes a folder a checkpoint: of a model, or of an adapter that names its base model."""


def checkpoint_path(name: str) -> str:
    """Return the folder of a checkpoint or of a LoRA adapter, or a name on the Hugging Face hub."""
    path = Path(resolve_path(name))
    if path.is_file():
        raise ValueError(f"{name} is a file: pass the checkpoint's folder")
    if path.is_dir() and not any((path / file).is_file() for file in CONFIGS):
        inside = sorted(config.parent.name for config in path.glob("*/config.json"))
        hint = f"; {inside[-1]} in it has one" if inside else ""
        raise ValueError(f"{name} is not a checkpoint: it has no config.json{hint}")
    return str(path)


def resolve_path(name: str) -> str:
    """Return an existing file or folder, or a name on the hub."""
    if not name:
        raise ValueError("the name is empty: pass a folder, or a name on the hub")
    path = Path(os.path.expanduser(name))
    noun = "file" if path.suffix == ".json" else "folder"
    is_path = noun == "file" or name.count("/") > 1 or name.startswith(("/", ".", "~"))
    if is_path and not path.exists():
        raise ValueError(f"there is no {noun} {name}")
    return str(path)


def has_weights(name: str) -> bool:
    """Return whether a resolved path has weights; a config alone has none."""
    path = Path(name)
    if not path.exists():
        return True  # on the hub; if it is not there, loading it says so
    files = [*path.glob("*"), *path.glob("*/*.distcp")]  # FSDP writes a folder of shards
    return any(file.name.endswith(WEIGHT_SUFFIXES) for file in files)


def is_adapter(name: str) -> bool:
    """Return whether a resolved path is the folder of an adapter alone, such as LoRA's."""
    path = Path(name)
    return (path / CONFIGS[1]).is_file() and not (path / CONFIGS[0]).is_file()


def load_model(name: str, dtype: str = "auto", device: str | None = None) -> Any:
    """Load a causal LM from a folder or the hub, in eval mode on its device."""
    target = _device(device)
    hide_progress_bars()
    try:
        model = load_weights(checkpoint_path(name), dtype=dtype)
    except Exception as error:  # Transformers and the hub raise many types
        raise ValueError(f"cannot load {name}: {short_error(error)}") from None
    return model.to(target).eval()


def load_weights(path: str, **options: Any) -> Any:
    """Load a causal LM; raise if weights are missing, which Transformers fills at random."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=False, output_loading_info=True, **options
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{len(missing)} of its weights are missing and would be random, such as {missing[0]}: "
            "the checkpoint does not belong to its config.json"
        )
    return model


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer from a folder or the hub."""
    from transformers import AutoTokenizer

    path = resolve_path(name)
    if Path(path).is_file():
        raise ValueError(f"{name} is a file: pass the folder of a tokenizer with --tokenizer")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            reason = f"{short_error(error)}; pass another with --tokenizer"
        elif Path(path).is_dir():
            is_there = "instantiate" not in str(error)  # otherwise there are no files of one
            why = f" ({short_error(error).rstrip('.')})" if is_there else ""
            reason = f"has no readable tokenizer{why}; pass one with --tokenizer"
        else:
            reason = f"{short_error(error).rstrip('.')}; there is no folder {name} here either"
        raise ValueError(f"{name}: {reason}") from None


def check_chat_template(tokenizer: Any) -> None:
    """Raise ValueError if --chat is given for a tokenizer without a chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("--chat: the tokenizer has no chat template")


def short_error(error: Exception) -> str:
    """Return an error's first line, and the second one if the first ends in a colon.

    Types other than ValueError and OSError are named: their messages are not written for users.

    >>> short_error(KeyError("full_attention"))
    "KeyError: 'full_attention'"
    """
    if "trust_remote_code" in str(error):
        return "it needs Python code that comes with it, which nopad never runs"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(":")
    type_name = "" if text and isinstance(error, OSError | ValueError) else type(error).__name__
    return ": ".join(filter(None, (type_name, text)))


def _device(name: str | None) -> Any:
    """Return the device and make it current; each process of a launcher gets its own GPU."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if num_gpus else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device {name}: pass cpu, cuda, cuda:1 ...") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        return _other_device(device)
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= num_gpus:
        raise ValueError(f"--device cuda:{index}: this machine has {num_gpus} CUDA devices")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)  # kernels run on the current device, not on that of their data
    return device


def _other_device(device: Any) -> Any:
    """Return a device that is neither a CPU nor CUDA, if this machine has it."""
    import torch

    try:
        torch.zeros(1, device=device).add(1).item()
    except (RuntimeError, AssertionError):
        message = f"--device {device}: this machine cannot use it; pass cpu, cuda, cuda:1 ..."
        raise ValueError(message) from None
    return device


def hide_progress_bars() -> None:
    """Hide Transformers' progress bars unless stderr is a terminal."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
