"""Editable installs that type checkers resolve; pyproject.toml holds everything else.

The repository's root is the package `nopad`. Setuptools would serve that with an import hook, which
mypy and pyright cannot follow. A link named `nopad` in `.editable/` is an ordinary package folder
to them and to Python.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

FOLDER = ".editable"


def link_root() -> bool:
    """Make `.editable/nopad`; False where links are not allowed, as on Windows by default."""
    link = Path(FOLDER, "nopad")
    link.parent.mkdir(exist_ok=True)
    try:
        if not link.is_symlink():
            link.symlink_to("..", target_is_directory=True)
    except OSError:
        return False
    return True


class EditableWheel(editable_wheel):
    def finalize_options(self) -> None:
        if link_root():
            self.distribution.package_dir = {"": FOLDER}
        super().finalize_options()


# Under its name, setuptools leaves this file out of the package at the root.
setup(script_name="setup.py", cmdclass={"editable_wheel": EditableWheel})
