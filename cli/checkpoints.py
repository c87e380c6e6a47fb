"""Models and tokenizers that a user named: what is wrong with the name is said in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

WEIGHTS = (
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
"""How files of weights end, or what lists them, also those that Transformers then refuses."""


def checkpoint_path(name: str) -> str:
    """The folder of that name, seen to hold a checkpoint; or a name to ask the hub for."""
    path = Path(resolve_path(name))
    if path.is_file():
        raise ValueError(f"{name} is a file: give the checkpoint's folder")
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"{name} is no checkpoint: there is no config.json in it")
    return str(path)


def resolve_path(name: str) -> str:
    """The file or folder of that name, or a name to ask the hub for."""
    path = Path(name).expanduser()
    kind = "file" if path.suffix == ".json" else "folder"
    is_path = kind == "file" or name.count("/") > 1 or name.startswith(("/", ".", "~"))
    if is_path and not path.exists():
        raise ValueError(f"there is no {kind} {name}")
    return str(path)


def has_weights(name: str) -> bool:
    """Whether what was found under that name has weights: a config alone has none."""
    path = Path(name)
    if not path.exists():
        return True  # the hub's, or else the hub says so
    files = [*path.glob("*"), *path.glob("*/*.distcp")]  # FSDP writes a folder of shards
    return any(file.name.endswith(WEIGHTS) for file in files)


def load_model(name: str, dtype: str = "auto", device: str | None = None) -> Any:
    """A causal LM of a folder or of the hub, on its device, ready to evaluate."""
    from transformers import AutoModelForCausalLM

    place = _device(device)
    quiet_bars()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint_path(name), dtype=dtype)
    except Exception as error:  # every library on the way to the weights has errors of its own
        raise ValueError(f"cannot load {name}: {short_error(error)}") from None
    return model.to(place).eval()


def load_tokenizer(name: str) -> Any:
    """A tokenizer of a folder or of the hub."""
    from transformers import AutoTokenizer

    place = resolve_path(name)
    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:
        if Path(place).is_dir():
            why = "has no tokenizer that can be read; name one with --tokenizer"
        else:
            why = f"{short_error(error).rstrip('.')}; --tokenizer takes a folder, too"
        raise ValueError(f"{name}: {why}") from None


def check_chat_template(tokenizer: Any) -> None:
    """Refuse --chat for a tokenizer that cannot say chats."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("--chat: the tokenizer has no chat template")


def short_error(error: Exception) -> str:
    """What an error says first, with the next line where the first only announces it.

    Errors that were not written for the user are told with their kind.

    >>> first_line(KeyError("full_attention"))
    "KeyError: 'full_attention'"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(":")
    kind = "" if said and isinstance(error, OSError | ValueError) else type(error).__name__
    return ": ".join(filter(None, (kind, said)))


def _device(name: str | None) -> Any:
    """The device of that name, made the current one; every process of a launcher gets its own."""
    import torch

    known = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if known else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device {name}: give cpu, cuda, cuda:1 ...") from None
    if device.type != "cuda":
        return device
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if index >= known:
        raise ValueError(f"--device cuda:{index}: there are {known} CUDA devices here")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)  # kernels run on the current one, not where their tensors lie
    return device


def quiet_bars() -> None:
    """Show bars of loading to people only."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
