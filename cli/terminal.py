"""Output of every command: tables, colour and progress bars, on a terminal and in a pipe.

On a terminal, output has colour unless NO_COLOR is set, and fits the width. In a pipe, it has no
colour and lines are not wrapped, so that other programs can read it. Control characters in data are
escaped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, marks that reverse text, and half characters."""
PIPE_WIDTH = 1000
"""Columns of a pipe: lines are not wrapped for a program that reads them."""


def printable(text: object) -> str:
    """Escape control characters as JSON does, so that data cannot control the terminal.

    >>> print(printable("a" + chr(27) + "[2J"))
    a\\u001b[2J
    """
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", str(text))


def console(stderr: bool = False) -> Console:
    """Return a console for standard output or error; texts are printed as they are."""
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with another status

    # Without markup, emoji codes and highlighting: brackets in data are not styles.
    stream = sys.stderr if stderr else sys.stdout
    made = PlainConsole(file=stream, markup=False, emoji=False, highlight=False)
    if not made.is_terminal:
        made.width = PIPE_WIDTH
    return made


def has_color(made: Console) -> bool:
    """Return whether a console shows colour."""
    return made.color_system is not None and not made.no_color


def table(*columns: str, right: Collection[str] = ()) -> Table:
    """Return an empty table; the last column may wrap, the others are as wide as their cells."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for name in columns:
        justify = "right" if name in right else "left"
        made.add_column(name, justify=justify, no_wrap=name != columns[-1], overflow="fold")
    return made


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error while the block runs, if that is a terminal.

    Yields a function to call with the number of items that are done. total: None if not known.
    """
    made = console(stderr=True) if sys.stderr is not None else None
    if made is None or not made.is_terminal:
        yield lambda done: None
        return
    from rich import progress as bars

    columns = [
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=32),
        bars.MofNCompleteColumn() if total is not None else bars.TextColumn("{task.completed:,}"),
        bars.TimeElapsedColumn(),
    ]
    with bars.Progress(*columns, console=made, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, advance=done)
