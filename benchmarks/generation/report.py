"""The table and the record of bench_generation: every row is printed and written at once."""

from __future__ import annotations

import gc
import json
from contextlib import contextmanager
from pathlib import Path

import torch
from record import header, write_record

_results: list[dict] = []
_file: Path | None = None
_discarding = False


def set_record_file(path: Path | None) -> None:
    """Write the record to this file after every row, so that an aborted run loses nothing."""
    global _file
    _file = path


def add_row(
    workload: str, who: str, seconds: float, tokens: int, floor: float = 0.0, **more
) -> None:
    """Print a row of the table and add it to the record.

    floor: the least possible seconds, if known.
    """
    if _discarding:
        return
    row = {"workload": workload, "who": who, "seconds": round(seconds, 3), "tokens": tokens}
    row["tokens_per_second"] = round(tokens / seconds, 1)
    if floor:
        row["share_of_floor"] = round(floor / seconds, 3)
    row |= {k: round(v, 5) if isinstance(v, float) else v for k, v in more.items()}
    add_result(row)
    share = f"{row.get('share_of_floor', 0):6.1%}" if floor else "      "
    extra = "  ".join(f"{k} {v}" for k, v in row.items() if k in more)
    print(
        f"{workload:8} {who:38} {seconds:8.3f} s {tokens / seconds:10.0f} tok/s {share}  {extra}",
        flush=True,
    )


def add_result(result: dict) -> None:
    """Add to the record, and write it."""
    _results.append(result)
    write_record(build_record(), _file)


def add_vllm(path: Path) -> None:
    """Add what vLLM measured in a process of its own: JSON lines, one for each workload or rate."""
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rate = row.get("rate")
        who = row["engine"] if rate is None else f"{row['engine']}, {rate:g} a second"
        shown = {
            key: value
            for key, value in row.items()
            if key.startswith(("ttft", "itl")) or key in ("spread", "startup_seconds", "settings")
        }
        workload = row["workload"] if rate is None else "o"
        add_row(workload, who, row["seconds"], row["new_tokens"], **shown)


def build_record() -> dict:
    """Return all results so far."""
    return {**header("generation"), "results": _results}


@contextmanager
def discard_rows():
    """Neither print nor record the rows that are added inside."""
    global _discarding
    _discarding = True
    try:
        yield
    finally:
        _discarding = False


def try_workload(workload: str, call):
    """Run one workload; if it fails, report that and return None, so that the others run."""
    try:
        return call()
    except Exception as error:
        add_result({"workload": workload, "failed": f"{type(error).__name__}: {error}"[:300]})
        print(f"{workload:8} failed: {type(error).__name__}: {error}", flush=True)
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()
