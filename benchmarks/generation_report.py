"""The table and the record of bench_generation: a line for people and a row kept, each at once."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from pathlib import Path

import torch
from record import head, write

_results: list[dict] = []
_file: Path | None = None
_quiet = False


def record_to(path: Path | None) -> None:
    """Write the record to this file after every row, so that a run cut short loses nothing."""
    global _file
    _file = path


def note(workload: str, who: str, seconds: float, tokens: int, floor: float = 0.0, **more) -> None:
    """Print a line of the table and keep it for the record."""
    if _quiet:
        return
    row = {"workload": workload, "who": who, "seconds": round(seconds, 3), "tokens": tokens}
    row["tokens_per_second"] = round(tokens / seconds, 1)
    if floor:
        row["share_of_floor"] = round(floor / seconds, 3)
    row |= {k: round(v, 5) if isinstance(v, float) else v for k, v in more.items()}
    keep(row)
    share = f"{row.get('share_of_floor', 0):6.1%}" if floor else "      "
    extra = "  ".join(f"{k} {v}" for k, v in row.items() if k in more)
    print(
        f"{workload:8} {who:38} {seconds:8.3f} s {tokens / seconds:10.0f} tok/s {share}  {extra}",
        flush=True,
    )


def keep(row: dict) -> None:
    """Add to the record, and write it down."""
    _results.append(row)
    write(card(), _file)


def card() -> dict:
    """All results, and what they were measured on."""
    return {**head("generation"), "results": _results}


@contextmanager
def quiet():
    """Leave what is measured inside out of table and record."""
    global _quiet
    _quiet = True
    try:
        yield
    finally:
        _quiet = False


def attempt(workload: str, call):
    """Run one workload; if it fails, say so and let the others run."""
    try:
        return call()
    except Exception as error:
        keep({"workload": workload, "failed": f"{type(error).__name__}: {error}"[:300]})
        print(f"{workload:8} failed: {type(error).__name__}: {error}", flush=True)
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()
