"""The table and the record of bench_generation: a line for people and a row kept, each at once."""

from __future__ import annotations

import gc
import json
import platform
import time
from contextlib import contextmanager
from pathlib import Path

import torch

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
    if _file is not None:
        _file.write_text(json.dumps(card(), indent=1) + "\n")


def card() -> dict:
    """All results, and what they were measured on."""
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "bench": "generation",
        "machine": f"{device}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "results": _results,
    }


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


def timed(call) -> tuple[float, object]:
    """Seconds a call takes: by the wall on a GPU, of processor time on a CPU others may share."""
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    start = clock()
    out = call()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start, out
