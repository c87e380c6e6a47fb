"""The table and the record of bench_generation: every row is printed and written at once."""

from __future__ import annotations

import gc
import json
import statistics
from pathlib import Path

import torch
from record import header, write_record

_VLLM_KEYS = ("spread", "all_seconds", "startup_seconds", "settings", "given", "versions")
_results: list[dict] = []
_file: Path | None = None


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
    row = {"workload": workload, "who": who, "seconds": round(seconds, 3), "tokens": tokens}
    row["tokens_per_second"] = round(tokens / seconds, 1)
    if floor:
        row["share_of_floor"] = round(floor / seconds, 3)
    row |= {k: round(v, 5) if isinstance(v, float) else v for k, v in more.items()}
    add_result(row)
    share = f"{row.get('share_of_floor', 0):6.1%}" if floor else "      "
    extra = "  ".join(f"{k} {row[k]}" for k, v in more.items() if not isinstance(v, dict))
    print(
        f"{workload:8} {who:38} {seconds:8.3f} s {tokens / seconds:10.0f} tok/s {share}  {extra}",
        flush=True,
    )


def add_result(result: dict) -> None:
    """Add to the record, and write it."""
    _results.append(result)
    write_record(build_record(), _file)


def add_vllm(path: Path) -> None:
    """Add what vLLM measured in a process of its own: JSON lines, one for each run.

    A rate that was run several times is one row, with the medians and all values.
    """
    runs: dict[tuple[str, str], list[dict]] = {}
    for run in map(json.loads, path.read_text().splitlines()):
        rate = run.get("rate")
        name = run["engine"] if rate is None else f"{run['engine']}, {rate:g} a second"
        runs.setdefault((run["workload"] if rate is None else "o", name), []).append(run)
    for (workload, who), repeats in runs.items():
        last = repeats[-1]
        shown = {key: last[key] for key in _VLLM_KEYS if key in last}
        for key in (key for key in last if key.startswith(("ttft", "itl"))):
            values = [run[key] for run in repeats]
            shown |= {key: statistics.median(values), f"{key}_all": [round(v, 5) for v in values]}
        seconds = statistics.median(run["seconds"] for run in repeats)
        add_row(workload, who, seconds, last["new_tokens"], **shown)


def build_record() -> dict:
    """Return all results so far."""
    return {**header("generation"), "results": _results}


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
