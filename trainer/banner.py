"""`print_banner`: print given lines on the first rank, above a progress bar."""

from __future__ import annotations

from tqdm import tqdm

from ..runtime import rank


def print_banner(lines: list[str]) -> None:
    """Print lines on the first rank, above a progress bar."""
    if rank() == 0:
        for line in lines:
            tqdm.write(f"nopad: {line}")
