"""Time to the first training step, in fresh processes with empty caches and with the same again.

    python benchmarks/bench_first_step.py [--cells NAME ...] [--arms NAME ...] [--warm N]
                                          [--record FILE] [--tiny]

Cold: the caches of inductor, Triton and numba are empty folders. Warm: a later process finds what
the cold one left there. The clock runs from the construction of the trainer, after the imports and
the model, to the end of the first optimizer step; "start check" is the time between them, which
includes the compilation of layers. Cells and arms are those of `training/grid.py`. Prints a table,
and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from record import header, write_record

CACHES = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"
SHOWN = "construction", "start check", "first step"


def measure(cell: str, arm: str, warm: int, tiny: bool) -> dict[str, list[dict]]:
    """Train a few steps in fresh processes; return the phases of each, by the state of caches."""
    rows: dict[str, list[dict]] = {}
    with TemporaryDirectory() as folder:
        environment = {**os.environ, **{name: f"{folder}/{name}" for name in CACHES}}
        for number, state in enumerate(["cold", *["warm"] * warm]):
            record = Path(folder) / f"{number}.json"
            script = str(Path(__file__).with_name("bench_training.py"))
            command = [sys.executable, script, "--grid", str(record), "--only", cell, "--arms", arm]
            command += ["--tiny"] if tiny else []
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
            row = json.loads(record.read_text())[cell][arm]
            if "error" in row:
                raise RuntimeError(f"{cell}, {arm}: {row['error']}")
            rows.setdefault(state, []).append(
                {name: row[name] for name in ("first_step_s", "phases_s", "tokens_per_second")}
            )
            phases = " ".join(f"{row['phases_s'][name]:12.2f}" for name in SHOWN)
            print(f"{cell:22} {arm:6} {state:5} {row['first_step_s']:8.2f} {phases}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="*", default=["llama-1b"], help="of training/grid.py")
    parser.add_argument("--arms", nargs="*", default=["nopad", "stock"])
    parser.add_argument("--warm", type=int, default=2, help="processes after the cold one")
    parser.add_argument("--record", type=Path, help="also write the JSON record to this file")
    parser.add_argument("--tiny", action="store_true", help="small shape, for any machine")
    args = parser.parse_args()
    record = {**header("first_step"), "cells": {}}
    columns = " ".join(f"{name:>12}" for name in SHOWN)
    print(f"{'':22} {'':6} {'':5} {'seconds':>8} {columns}", flush=True)
    for cell in args.cells:
        for arm in args.arms:
            rows = measure(cell, arm, args.warm, args.tiny)
            record["cells"].setdefault(cell, {})[arm] = rows
            write_record(record, args.record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
