"""What is installed: a wheel of the package alone, or an editable install that is a link."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import nopad
import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIRED = re.compile(r"(?P<name>[\w-]+)(?:>=(?P<least>[\d.]+))?(?:,<(?P<below>[\d.]+))?")


def copy_of_the_repository(folder: Path) -> Path:
    """The repository without what builds and runs leave in it."""
    built = shutil.ignore_patterns(".git", ".venv*", ".editable", "build", "dist", "site", "runs",
                                   "*.egg-info", "__pycache__", ".*_cache")  # fmt: skip
    return Path(shutil.copytree(ROOT, folder / "src", ignore=built))


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    return copy_of_the_repository(tmp_path_factory.mktemp("tree"))


def build(kind: str, tree: Path, into: Path) -> Path:
    """What `python -m build` or `pip install -e` ask setuptools for, without a new environment."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(into)!r}))"
    out = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tree, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    return into / out.stdout.splitlines()[-1]


def belongs_to_the_package() -> set[str]:
    """The files of the listed packages and their data, as they are named in a wheel."""
    found = set()
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        folder = ROOT.joinpath(*package.split(".")[1:])
        data = PROJECT["tool"]["setuptools"]["package-data"].get(package, [])
        files = [file for pattern in ["*.py", *data] for file in folder.glob(pattern)]
        found |= {f"nopad/{file.relative_to(ROOT).as_posix()}" for file in files}
    return found - {"nopad/setup.py"}


@cache
def requirements() -> dict[str, re.Match[str]]:
    """The libraries of all lists in pyproject.toml that have a lower bound, by name."""
    project = PROJECT["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [REQUIRED.match(line) for lines in lists for line in lines]
    return {match["name"]: match for match in found if match and match["least"]}


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_the_version_has_one_place():
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", nopad.__version__)
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")
    assert nopad.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_lower_bounds_are_the_versions_that_the_nightly_run_tests():
    oldest = pins(".ci/oldest.txt")
    tested = ["transformers", "accelerate", "datasets", "lightning", "trl", "peft", "lm-eval"]
    for name in tested:
        assert oldest[name].startswith(requirements()[name]["least"]), name


def test_the_upper_bound_of_transformers_follows_the_version_that_ci_tests():
    major, minor, *_ = pins("constraints.txt")["transformers"].split(".")
    assert requirements()["transformers"]["below"] == f"{major}.{int(minor) + 1}"


def modules_and_data(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_package_alone(tree, tmp_path):
    held = modules_and_data(build("wheel", tree, tmp_path))
    assert held == belongs_to_the_package()
    assert {"nopad/py.typed", "nopad/__main__.py", "nopad/recipes/pretrain.py"} <= held


@pytest.mark.slow
def test_a_file_at_the_root_would_be_seen(tmp_path):
    tree = copy_of_the_repository(tmp_path)
    (tree / "left_over.py").touch()
    extra = modules_and_data(build("wheel", tree, tmp_path)) - belongs_to_the_package()
    assert extra == {"nopad/left_over.py"}


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(tree, tmp_path):
    with tarfile.open(build("sdist", tree, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"nopad-{nopad.__version__}"
    assert not [name for name in ("tests", "benchmarks", "docs") if (unpacked / name).exists()]
    assert modules_and_data(build("wheel", unpacked, tmp_path)) == belongs_to_the_package()


def editable_python(tree: Path, folder: Path) -> Path:
    """An environment with nothing but an editable install of the tree; its interpreter."""
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv").glob("[Ll]ib/**/site-packages")
    with ZipFile(build("editable", tree, folder)) as wheel:
        wheel.extractall(site)
    (interpreter,) = (folder / "venv").glob("*/python" if sys.platform != "win32" else "*/*n.exe")
    return interpreter


def added_path(python: Path) -> Path:
    """The folder that the editable install adds to Python's path."""
    (pth,) = python.parents[1].glob("[Ll]ib/**/*nopad*.pth")
    return Path(pth.read_text().strip())


def test_an_editable_install_is_a_path_that_type_checkers_follow(tree, tmp_path):
    python = editable_python(tree, tmp_path)
    assert (added_path(python) / "nopad" / "packing").samefile(tree / "packing")
    code = "import nopad.recipes, importlib.util as u; print(u.find_spec('recipes'))"
    out = subprocess.run([python, "-I", "-c", code], cwd=tree, capture_output=True, text=True)
    assert (out.returncode, out.stdout) == (0, "None\n"), "folders are importable under two names"


@pytest.mark.slow
def test_the_import_hook_of_setuptools_would_be_seen(tmp_path):
    tree = copy_of_the_repository(tmp_path)
    (tree / "setup.py").unlink()
    assert not added_path(editable_python(tree, tmp_path)).exists()


@pytest.mark.slow
def test_a_type_checker_resolves_an_editable_install(tree, tmp_path):
    python = editable_python(tree, tmp_path)
    (tmp_path / "use.py").write_text("import nopad\nreveal_type(nopad.Engine)\n")
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", python, tmp_path / "use.py"]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=alone)
    assert out.returncode == 0 and '"type[Engine]"' in out.stdout, out.stdout
