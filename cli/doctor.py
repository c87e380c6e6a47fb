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
import copy
import logging
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..attention import why_refused
from ..attention.selfcheck import Packed, check_default_cache, check_packed, check_paged
from .shrink import scramble, shrink

IMPLEMENTATIONS = ("nopad", "flash_attention_2", "sdpa", "eager", "flex_attention")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one attention implementation did with a pack."""

    name: str
    verdict: str
    """apart, LEAK, WRONG, refused, or not run."""
    packed: Packed | None = None
    paged: float | None = None
    note: str = ""

    @property
    def bad(self) -> bool:
        return self.verdict in ("LEAK", "WRONG")


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="nopad doctor", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", help="a checkpoint folder, a config.json, or a model type")
    parser.add_argument("--attn", default=",".join(IMPLEMENTATIONS), help="which, by commas")
    parser.add_argument("--tiny", action="store_true", help="shrink the model, with random weights")
    parser.add_argument(
        "--agreement", action="store_true", help="compare generation with training, by dtype"
    )
    options = parser.parse_args(argv)
    _be_quiet()
    try:
        model = load(options.model, options.tiny)
    except (OSError, ValueError, KeyError) as error:
        print(f"nopad doctor: cannot build {options.model}: {error}", file=sys.stderr)
        return 2
    if options.agreement:
        return _agreement(options.model, model)
    findings = [examine(model, name.strip()) for name in options.attn.split(",")]
    print(report(options.model, model, findings))
    return int(any(finding.bad for finding in findings))


def _agreement(name: str, model: Any) -> int:
    """Print how far generation and training lie apart; 1 where it is more than rounding.

    It is 1 as well where the backend that runs everywhere did not, or none.
    """
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
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    path = Path(name)
    if path.suffix == ".json" and not path.exists():
        raise OSError("there is no such file")
    kind = {"attn_implementation": "eager", "dtype": torch.float32}
    if not path.exists() and name in CONFIG_MAPPING:
        config, tiny = CONFIG_MAPPING[name](), True
    else:
        config = AutoConfig.from_pretrained(path if path.exists() else name)
        folder = path if path.is_dir() else path.parent
        weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
        tiny = tiny or (path.exists() and (path.is_file() or not weights))
    if tiny:
        model = AutoModelForCausalLM.from_config(shrink(config), **kind)
        scramble(model)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, **kind)
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    return model.eval().to(device)


def examine(oracle: Any, name: str) -> Finding:
    """Hold one implementation against the documents run one by one with eager attention."""
    reason = why_refused(oracle) if name == "nopad" else None
    if reason is not None:
        return Finding(name, "refused", note=reason)
    try:
        model = with_attention(oracle, name)
        packed = check_packed(model, oracle)
        paged = check_paged(model) if name == "nopad" else None
    except Exception as error:  # whatever a model or kernel library raises is the answer
        return Finding(name, "not run", note=_first_line(error))
    limit = tolerance(model)
    verdict = "LEAK" if packed.leak > limit else "apart" if packed.right(limit) else "WRONG"
    if paged is not None and paged > limit:
        verdict = "WRONG"
    return Finding(name, verdict, packed, paged, _advice(model, oracle, verdict, limit))


def _advice(model: Any, oracle: Any, verdict: str, limit: float) -> str:
    """What mends a leak, or what would open one."""
    stock = model.config._attn_implementation in ("sdpa", "eager")
    if verdict != "apart":
        return _repair(model, oracle, limit) if stock else ""
    leaks = check_default_cache(model) > limit
    return "but leaks where the batch does not say use_cache=False" if leaks else ""


def with_attention(model: Any, name: str) -> Any:
    """The same weights under another attention implementation."""
    if name == model.config._attn_implementation:
        return model
    other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=name)
    if other.config._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} falls back to {other.config._attn_implementation}"
        )
    half = "flash" in name
    other = other.to(device=model.device, dtype=torch.bfloat16 if half else model.dtype)
    other.load_state_dict(model.state_dict())
    return other.eval()


def tolerance(model: Any) -> float:
    return 1e-3 if model.dtype == torch.float32 else 0.25


def _repair(model: Any, oracle: Any, limit: float) -> str:
    """Whether nopad's wrapper of the stock masks mends it."""
    try:
        mended = check_packed(model, oracle, repair=True).right(limit)
    except Exception as error:
        return f"repair failed: {_first_line(error)}"
    return "mended by nopad.attention.keep_apart" if mended else "keep_apart does not mend it"


def report(name: str, model: Any, findings: list[Finding]) -> str:
    """The table, and a sentence that says what to do."""
    count = sum(p.numel() for p in model.parameters())
    lines = [f"{name}: {type(model).__name__}, {count:,} parameters, {model.device.type}", ""]
    head = ("attention", "verdict", "leak", "logits", "loss", "gradients", "paged", "note")
    rows = [head, *(_row(finding) for finding in findings)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    for row in rows:
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    bad = [finding.name for finding in findings if finding.bad]
    fine = [finding.name for finding in findings if finding.verdict == "apart"]
    lines.append("")
    if bad:
        lines.append(f"Do not train packed batches with {', '.join(bad)}.")
    if fine:
        lines.append(f"Packed documents stay apart with {', '.join(fine)}.")
    return "\n".join(lines)


def _row(finding: Finding) -> tuple[str, ...]:
    packed = finding.packed
    numbers = (
        [packed.leak, packed.logits, packed.loss, packed.gradients, finding.paged]
        if packed is not None
        else [None] * 5
    )
    cells = ["-" if x is None else f"{x:.1e}" if x else "0" for x in numbers]
    return (finding.name, finding.verdict, *cells, finding.note)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"


def _be_quiet() -> None:
    from transformers.utils import logging as chatter

    chatter.set_verbosity_error()
    logging.getLogger("nopad.attention").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
