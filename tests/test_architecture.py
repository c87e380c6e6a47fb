"""The tree is the architecture: who may import whom, and the house rules, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("packing", "attention", "collators", "trainer", "inference", "cli")
ANYWHERE = {"numpy", "tqdm", *sys.stdlib_module_names}

OURS = {
    "packing": set(),
    "attention": set(),
    "collators": {"packing", "attention"},
    "trainer": {"packing", "collators", "attention"},
    "inference": {"attention"},
    "cli": set(ROOMS),
}
OTHERS = {
    "packing": {"numba", "llvmlite"},
    "attention": {"torch", "triton"},
    "collators": {"torch"},
    "trainer": {"torch", "triton"},
    "inference": {"torch", "triton"},
}
# A library that only some files of a room may import.
ONLY_IN = {
    ("packing", "pyarrow"): "packing/sources/",
    ("packing", "datasets"): "packing/sources/",
    ("packing", "torch"): "packing/dataset.py",
    ("attention", "transformers"): "attention/hf/interface.py",
    ("attention", "flash_attn"): "attention/backends/",
    ("attention", "flash_attn_interface"): "attention/backends/",
    ("attention", "kernels"): "attention/backends/",
    ("attention", "cudnn"): "attention/backends/",
    ("trainer", "transformers"): "trainer/with_hf",
    ("trainer", "accelerate"): "trainer/with_accelerate",
    ("trainer", "lightning"): "trainer/with_lightning",
    ("trainer", "pytorch_lightning"): "trainer/with_lightning",
    ("inference", "lm_eval"): "inference/harness",
}


def sources(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


def imports(path: Path) -> list[tuple[str, str]]:
    """('ours', room) or ('others', library) for every import statement of a file."""
    found, package = [], path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [("others", alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(("others", (node.module or "").split(".")[0]))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [("ours", ".".join([*base, name]).split(".")[0]) for name in names]
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_every_import_is_allowed_by_the_table(room):
    wrong = []
    for path in sources(room):
        where = path.relative_to(ROOT).as_posix()
        for kind, name in imports(path):
            if kind == "ours" and name not in OURS[room] | {room, "__version__"}:
                wrong.append(f"{where} imports our {name}")
            if kind == "others" and room != "cli" and name not in ANYWHERE | OTHERS[room]:
                prefix = ONLY_IN.get((room, name))
                if prefix is None or not where.startswith(prefix):
                    wrong.append(f"{where} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_import_reader_sees_relative_and_absolute_imports(tmp_path, monkeypatch):
    (tmp_path / "trainer").mkdir()
    bad = tmp_path / "trainer" / "bad.py"
    bad.write_text("from ..inference.engine import Engine\nimport transformers.models\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert imports(bad) == [("ours", "inference"), ("others", "transformers")]


def test_the_package_list_equals_the_tree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in sources(*ROOMS)}
    assert sorted(listed) == sorted(["nopad", *(".".join(["nopad", *f.parts]) for f in folders)])
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders)


def test_files_and_functions_stay_short():
    long = []
    for path in sources(*ROOMS, "recipes", "benchmarks"):
        text = path.read_text()
        if len(text.splitlines()) > 400:
            long.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
                lines = node.end_lineno - node.lineno + 1
                if lines > 60:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles it: a kernel is cut by what runs together, not by length."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.parametrize("recipe", ["sft", "train_hf", "pretrain_lightning"])
def test_recipes_that_people_copy_fit_on_two_screens(recipe):
    assert len((ROOT / "recipes" / f"{recipe}.py").read_text().splitlines()) <= 120


def test_every_module_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in sources(*ROOMS, "recipes", "benchmarks", "tests")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, silent


def test_no_file_hides_behind_a_general_name_or_shadows_a_module():
    banned = {"utils", "common", "helpers", "core", "config", "misc"}
    library = {"accelerate", "datasets", "torch", "transformers", "lightning", "triton", "numba"}
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources(*ROOMS, "recipes", "benchmarks")
        if path.stem in banned | library | (set(sys.stdlib_module_names) - {"__init__"})
    ]
    assert not wrong, wrong


def test_no_code_is_loaded_from_data():
    banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    wrong = []
    for path in sources(*ROOMS, "recipes"):
        where = path.relative_to(ROOT).as_posix()
        wrong += [f"{where} imports {n}" for k, n in imports(path) if k == "others" and n in banned]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                wrong += _unsafe_call(where, node)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "call",
    ["eval('1')", "yaml.load(f)", "torch.load(f)", "torch.load(f, weights_only=False)",
     "AutoModel.from_pretrained(name, trust_remote_code=True)"],
)  # fmt: skip
def test_the_reader_of_calls_sees_unsafe_ones(call):
    assert _unsafe_call("x.py", ast.parse(call, mode="eval").body)
    assert not _unsafe_call("x.py", ast.parse("torch.load(f, weights_only=True)", mode="eval").body)


def test_nothing_listens_on_a_network():
    servers = {"http", "socket", "socketserver", "asyncio", "fastapi", "flask", "aiohttp"}
    found = [(path.name, name) for path in sources(*ROOMS) for _, name in imports(path)]
    assert [(where, name) for where, name in found if name in servers] == []


def _unsafe_call(where: str, node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name in ("eval", "exec", "yaml.load"):
        return [f"{where}:{node.lineno} calls {name}"]
    if name == "torch.load" and words.get("weights_only") != "True":
        return [f"{where}:{node.lineno} torch.load without weights_only=True"]
    if words.get("trust_remote_code") == "True":
        return [f"{where}:{node.lineno} trusts remote code"]
    return []


def test_importing_the_package_loads_nothing_heavy():
    heavy = ["torch", "transformers", "numba", "pyarrow", "datasets", "accelerate"]
    program = f"import sys, nopad; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_readme_is_short_and_names_both_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    assert "pip install -c constraints.txt -e . && accelerate launch recipes/pretrain.py" in text
    assert 'pip install -c constraints.txt -e ".[dev]" && pytest' in text
