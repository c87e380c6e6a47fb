"""Power draw and clock of the GPU during a benchmark, read from nvidia-smi."""

from __future__ import annotations

import shutil
import statistics
import subprocess


class PowerMonitor:
    """Mean power and clock of the GPU, since the power cap may be what limits a step.

    A context manager, so that no nvidia-smi keeps running after an error.
    """

    _process: subprocess.Popen | None = None

    def __enter__(self) -> PowerMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        query = "--query-gpu=power.draw.instant,clocks.sm,clocks.max.sm,power.limit"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "100"]
        if shutil.which(command[0]) is not None:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def stop(self) -> dict[str, float]:
        """Return the means since the start; nothing if it was not started."""
        process, self._process = self._process, None
        if process is None:
            return {}
        process.terminate()
        lines = process.communicate()[0].decode().splitlines()
        rows = [[float(x) for x in line.split(",")] for line in lines[:-1] if "N/A" not in line]
        names = ("watts", "MHz", "MHz_at_most", "watts_at_most")
        columns = zip(*rows, strict=True)
        return {name: statistics.mean(c) for name, c in zip(names, columns, strict=False)}
