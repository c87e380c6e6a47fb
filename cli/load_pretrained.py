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


def checkpoint_path(name: str) -> str:
    """Return a checkpoint folder, or a name on the Hugging Face hub."""
    path = Path(resolve_path(name))
    if path.is_file():
        raise ValueError(f"{name} is a file: pass the checkpoint's folder")
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"{name} is not a checkpoint: it has no config.json")
    return str(path)


def resolve_path(name: str) -> str:
    """Return an existing file or folder, or a name on the hub."""
    path = Path(name).expanduser()
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


def load_model(name: str, dtype: str = "auto", device: str | None = None) -> Any:
    """Load a causal LM from a folder or the hub, in eval mode on its device."""
    from transformers import AutoModelForCausalLM

    target = _device(device)
    hide_progress_bars()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint_path(name), dtype=dtype, trust_remote_code=False
        )
    except Exception as error:  # Transformers and the hub raise many types
        raise ValueError(f"cannot load {name}: {short_error(error)}") from None
    return model.to(target).eval()


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer from a folder or the hub."""
    from transformers import AutoTokenizer

    path = resolve_path(name)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            reason = f"{short_error(error)}; pass another with --tokenizer"
        elif Path(path).is_dir():
            reason = "has no readable tokenizer; pass one with --tokenizer"
        else:
            reason = f"{short_error(error).rstrip('.')}; --tokenizer also takes a folder"
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
    if device.type != "cuda":
        return device
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= num_gpus:
        raise ValueError(f"--device cuda:{index}: this machine has {num_gpus} CUDA devices")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)  # kernels run on the current device, not on that of their data
    return device


def hide_progress_bars() -> None:
    """Hide Transformers' progress bars unless stderr is a terminal."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
