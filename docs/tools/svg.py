"""A small SVG canvas: a card that is light or dark as the reader's browser is, with its text."""

from __future__ import annotations

from html import escape
from typing import Any

PALETTE = ("#3b82d6", "#1f9d8a", "#c2872b", "#8a63c9", "#c75d6b", "#5d8a3a", "#4a5bb5")
"""Colours of documents; white text is readable on each."""

STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { fill: #1f2328; font-family: system-ui, -apple-system, "Segoe UI", sans-serif }
  .quiet { fill: #59636e }
  .mono { font-family: ui-monospace, SFMono-Regular, Menlo, monospace }
  .on-colour { fill: #ffffff }
  .padding { fill: #e3e8ed }
  .peer { fill: #a9b3bd }
  .ours { fill: #2f7fd1 }
  .line { stroke: #8c959f; fill: none }
  @media (prefers-color-scheme: dark) {
    .card { fill: #151b23; stroke: #3d444d }
    text { fill: #f0f6fc }
    .quiet { fill: #9198a1 }
    .padding { fill: #2a313a }
    .peer { fill: #656c76 }
    .on-colour { fill: #ffffff }
  }
"""


class Canvas:
    """Shapes, drawn in the order of the calls."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []
        self.rect(0.5, 0.5, width - 1, height - 1, css="card", rx=8)

    def rect(self, x: float, y: float, w: float, h: float, **options: Any) -> None:
        self._add("rect", x=x, y=y, width=w, height=h, **options)

    def line(self, x1: float, y1: float, x2: float, y2: float, **options: Any) -> None:
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, **{"css": "line", **options})

    def text(self, x: float, y: float, text: str, size: float = 13, **options: Any) -> None:
        """anchor: "start", "middle" or "end"; weight: of the font."""
        names = {"anchor": "text-anchor", "weight": "font-weight"}
        options = {names.get(name, name): value for name, value in options.items()}
        self._add("text", escape(text), x=x, y=y, **{"font-size": size, **options})

    def _add(self, shape: str, inner: str = "", **attributes: Any) -> None:
        if "css" in attributes:
            attributes["class"] = attributes.pop("css")
        pairs = " ".join(f'{name}="{_number(value)}"' for name, value in attributes.items())
        self._shapes.append(
            f"<{shape} {pairs}>{inner}</{shape}>" if inner else f"<{shape} {pairs}/>"
        )

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
        lines = [f'{head}{size} role="img">', f"<title>{escape(self.title)}</title>"]
        return "\n".join([*lines, f"<style>{STYLE}</style>", *self._shapes, "</svg>", ""])


def _number(value: Any) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
