"""Resolve the name of a checkpoint: a folder, a LoRA adapter, a name on the hub; load nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

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
        inside = _newest_checkpoint(path)
        hint = "" if inside is None else f"; its newest checkpoint is {os.path.join(name, inside)}"
        raise ValueError(f"{name} is not a checkpoint: it has no config.json{hint}")
    return str(path)


def _newest_checkpoint(run: Path) -> str | None:
    """Return the name of the folder inside a run that has a model, the highest step if several."""
    found = {config.parent.name for file in CONFIGS for config in run.glob(f"*/{file}")}
    found = {name for name in found if has_weights(str(run / name))}
    steps = {name: name.removeprefix("checkpoint-") for name in found}
    return max(found, key=lambda n: int(steps[n]) if steps[n].isdecimal() else 0, default=None)


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


def base_model_name(name: str) -> str:
    """Return the model that an adapter's folder names as its base."""
    config = json.loads((Path(name) / CONFIGS[1]).read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{name} names no base model in its {CONFIGS[1]}")
    return base


def adapter_error(name: str, error: Exception) -> str:
    """Say why an adapter cannot be loaded: its base model may be somewhere else by now."""
    base = base_model_name(name)
    if Path(base).is_dir() or not isinstance(error, OSError | ValueError):  # PEFT may be missing
        return short_error(error)
    return (
        f"its base model {base} is not a folder here, nor could it be loaded from the hub; put it "
        f"there, or set base_model_name_or_path in {Path(name) / CONFIGS[1]}"
    )


def has_tokenizer(name: str) -> bool:
    """Return whether a resolved path has the files of a tokenizer; names on the hub may have."""
    path = Path(name)
    patterns = ("tokenizer*", "vocab*", "*.model", "merges.txt")
    return not path.is_dir() or any(True for each in patterns for _ in path.glob(each))


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
