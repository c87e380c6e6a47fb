"""Pages that the build adds: the README, the READMEs of the folders, and tables of records."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import families
import records

ROOT = Path(__file__).parents[2]
ROOMS = (
    "packing", "collators", "attention", "trainer", "inference", "recipes", "benchmarks",
)  # fmt: skip
TABLE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)

_package = tempfile.TemporaryDirectory()
(Path(_package.name) / "nopad").symlink_to(ROOT, target_is_directory=True)
sys.path.insert(0, _package.name)  # mkdocstrings finds `nopad` here, however it is installed
os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")  # of tqdm, in notebooks


def on_files(files: Files, config: Any) -> Files:
    """Add pages that are elsewhere in the repository."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    home = readme.replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing.md)")
    files.append(File.generated(config, "index.md", content=home))
    sources = {f"internals/{room}.md": ROOT / room / "README.md" for room in ROOMS}
    sources["changelog.md"] = ROOT / "CHANGELOG.md"
    sources["contributing.md"] = ROOT / "CONTRIBUTING.md"
    for name, source in sources.items():
        files.append(File.generated(config, name, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace `<!-- table: NAME -->` by the table of that name in `records.py` or `families.py`."""
    tables = {**vars(records), **vars(families)}
    return TABLE.sub(lambda found: tables[f"{found[1]}_table"](), markdown)
