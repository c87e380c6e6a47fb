"""Write what is generated and committed: the pictures, and the table of results in the README.

python docs/tools/update.py           after a new benchmark record, or a change of the pictures
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from packing_pictures import anatomy_of_a_pack, padded_and_packed
from records import ROOT, results_plot, results_table

IMAGES: dict[str, Callable[[], str]] = {
    "docs/images/pack.svg": anatomy_of_a_pack,
    "docs/images/padded-and-packed.svg": padded_and_packed,
    "docs/images/results.svg": results_plot,
}
FIRST, LAST = "<!-- results -->", "<!-- end of results -->"


def generated_files() -> dict[Path, str]:
    """The committed files, with the content that they should have."""
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(FIRST)
    text = "\n\n".join([before + FIRST, results_table(), LAST + rest.partition(LAST)[2]])
    return {readme: text, **{ROOT / name: draw() for name, draw in IMAGES.items()}}


if __name__ == "__main__":
    for path, content in generated_files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(path.relative_to(ROOT))
