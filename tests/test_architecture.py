"""The tree is the architecture: who may import whom, and the house rules, read from the sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = (
    "runtime", "kernels", "packing", "attention", "collators", "trainer", "inference", "cli",
    "recipes", "integrations",
)  # fmt: skip
ANYWHERE = {"numpy", "tqdm", *sys.stdlib_module_names}

OURS = {
    "runtime": set(),
    "kernels": set(),
    "packing": set(),
    "attention": {"kernels", "runtime"},
    "collators": {"packing", "attention"},
    "trainer": {"packing", "collators", "attention", "kernels", "runtime"},
    "inference": {"attention", "kernels", "runtime"},
    "cli": set(ROOMS),
    "recipes": set(ROOMS),
    "integrations": {"packing", "collators", "attention", "trainer", "inference", "runtime"},
}
OTHERS = {
    "runtime": {"torch"},
    "kernels": {"torch", "triton"},
    "packing": {"numba", "llvmlite"},
    "attention": {"torch"},
    "collators": {"torch"},
    "trainer": {"torch"},
    "inference": {"torch", "triton"},
    "integrations": {"axolotl", "pydantic"},
}
# A library, or a room of ours, that only some files of a room may import.
ONLY_IN = {
    ("packing", "pyarrow"): "packing/sources/",
    ("packing", "datasets"): "packing/sources/",
    ("packing", "fsspec"): "packing/sources/remote/",
    ("packing", "ray"): "packing/encoding/ray_tasks.py",
    ("packing", "PIL"): "packing/images.py",
    ("packing", "fastokens"): "packing/encoding/text_encoder.py",
    ("packing", "torch"): "packing/dataset.py",
    ("packing", "runtime"): "packing/dataset.py",
    ("attention", "transformers"): "attention/hf/",
    ("attention", "flash_attn"): "attention/backends/",
    ("attention", "flash_attn_interface"): "attention/backends/",
    ("attention", "kernels"): "attention/backends/",
    ("attention", "cudnn"): "attention/backends/",
    ("trainer", "transformers"): ("trainer/with_hf/", "trainer/with_trl/"),
    ("trainer", "trl"): "trainer/with_trl/",
    ("trainer", "accelerate"): "trainer/with_accelerate/",
    ("trainer", "lightning"): "trainer/with_lightning/",
    ("trainer", "pytorch_lightning"): "trainer/with_lightning/",
    ("inference", "lm_eval"): "inference/harness/",
    ("inference", "starlette"): "inference/endpoint/",
    ("inference", "uvicorn"): "inference/endpoint/",
    ("inference", "transformers"): "inference/pretrained/",
    ("inference", "peft"): "inference/pretrained/",
    ("inference", "matplotlib"): "inference/metrics/",
}
# Folders and files of a room, from the top down: each may import its own layer and those below.
LAYERS = {
    "packing": [
        {"dataset", "pipeline"}, {"compiler_process"}, {"readers"}, {"encoding"}, {"sources"},
        {"settings"}, {"planning"}, {"state"}, {"ordering"}, {"pack"},
        {"sample", "targets", "images", "document_starts", "token_ids", "numba_jit",
         "preparation_progress", "argument_checks"},
    ],
    "attention": [
        {"hf"}, {"attend", "custom_ops", "head_exchange", "image_spans"}, {"backends"}, {"paging"},
        {"varlen", "score_params", "reference"},
    ],
    "trainer": [
        {"with_hf", "with_trl", "with_lightning", "with_accelerate"}, {"evaluation"},
        {"monitoring"}, {"data"}, {"loss", "layers"},
        {
            "banner", "checkpoint_manifest", "folder_lock", "fsdp_unshard", "graceful_stop",
            "train_mode",
        },
    ],
    "inference": [
        {"harness", "endpoint"}, {"data_parallel", "logprob_parity"}, {"engine"},
        {"request_runner"}, {"session"}, {"executor"}, {"settings", "batch_invariant"},
        {"fused"}, {"execution"}, {"scheduling"}, {"metrics"}, {"requests"},
        {"live_model", "pretrained"},
    ],
    "recipes": [
        {"pretrain", "pretrain_lightning", "train_hf", "sft", "grpo", "dpo"}, {"support"},
    ],
}  # fmt: skip


def sources(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules(path: Path, typing: bool = True) -> list[tuple[tuple[str, ...], str]]:
    """(module of ours as a path, imported name) for every import of our own code in a file.

    typing: count imports that only type checkers see.
    """
    found, package = [], path.relative_to(ROOT).parent.parts
    tree = parsed(path)
    guarded = [node for node in ast.walk(tree) if isinstance(node, ast.If)
               and ast.unparse(node.test) == "TYPE_CHECKING"]  # fmt: skip
    skipped = set() if typing else {inner for block in guarded for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node in skipped:
            continue
        names = (node.module or "").split(".") if node.module else []
        if node.level:
            base = package[: len(package) - node.level + 1]
        elif names and names[0] == "nopad":
            base, names = (), names[1:]
        else:
            continue
        found += [_module((*base, *names), alias.name) for alias in node.names]
    return found


def _module(parts: tuple[str, ...], name: str) -> tuple[tuple[str, ...], str]:
    """`from .folder import module` imports the module."""
    inner = ROOT.joinpath(*parts, name)
    is_module = inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()
    return ((*parts, name), "*") if is_module and name not in exported(parts) else (parts, name)


def exported(parts: tuple[str, ...]) -> set[str]:
    """What a face lists as public."""
    face = ROOT.joinpath(*parts, "__init__.py")
    for node in parsed(face).body if face.exists() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def libraries(path: Path) -> list[str]:
    """Top-level names of the libraries a file imports."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((node.module or "").split(".")[0])
    return [name for name in found if name != "nopad"]


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("room", ROOMS)
def test_every_import_is_allowed_by_the_table(room):
    wrong = []
    for path in sources(room):
        for (other, *_), _ in [found for found in modules(path) if found[0]]:
            if other not in OURS[room] | {room} and not _only_here(path, room, other):
                wrong.append(f"{place(path)} imports our {other}")
        for name in libraries(path):
            allowed = room not in OTHERS or name in ANYWHERE | OTHERS[room]
            if not allowed and not _only_here(path, room, name):
                wrong.append(f"{place(path)} imports {name}")
    assert not wrong, "\n".join(wrong)


def _only_here(path: Path, room: str, name: str) -> bool:
    prefix = ONLY_IN.get((room, name))
    return prefix is not None and place(path).startswith(prefix)


def test_other_rooms_are_imported_through_their_faces():
    wrong = []
    for path in sources(*ROOMS, "benchmarks"):
        room = path.relative_to(ROOT).parts[0]
        for parts, name in modules(path):
            if parts and parts[0] != room and name not in exported(parts):
                wrong.append(f"{place(path)} imports {name} of {'.'.join(parts)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", LAYERS)
def test_no_folder_imports_one_above_it(room):
    level = {name: number for number, layer in enumerate(LAYERS[room]) for name in layer}
    wrong = []
    for path in sources(room):
        own = path.relative_to(ROOT / room).parts
        if own == ("__init__.py",):
            continue
        for parts, name in modules(path, typing=False):
            inside = parts[:1] == (room,) and len(parts) > 1
            if inside and level[parts[1]] < level[own[0].removesuffix(".py")]:
                wrong.append(f"{place(path)} imports {'.'.join(parts)}.{name}")
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_in_a_circle():
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path in sources(*ROOMS):
        own = path.relative_to(ROOT).with_suffix("").parts
        if own[-1] != "__init__":
            graph[own] = {parts for parts, _ in modules(path, typing=False)}
    done: set[tuple[str, ...]] = set()

    def visit(file: tuple[str, ...], above: tuple[tuple[str, ...], ...]) -> None:
        assert file not in above, " -> ".join(map("/".join, [*above, file]))
        if file in done or file not in graph:
            return
        for other in graph[file]:
            visit(other, (*above, file))
        done.add(file)

    for file in graph:
        visit(file, ())


def test_every_folder_has_a_face():
    wrong = []
    for folder in sorted({path.parent for path in sources(*ROOMS, "benchmarks", "tests")}):
        name = place(folder)
        if name.split("/")[0] not in ("benchmarks", "tests"):
            doc = ast.get_docstring(parsed(folder / "__init__.py"))
            if not doc or not doc.splitlines()[0].endswith("."):
                wrong.append(f"{name}/__init__.py does not say in a sentence what it is for")
            if name not in ("cli", "integrations", "recipes", "recipes/support") and not exported(
                folder.relative_to(ROOT).parts
            ):
                wrong.append(f"{name}/__init__.py lists no public names")
    assert not wrong, "\n".join(wrong)


def test_the_import_reader_sees_relative_and_absolute_imports(tmp_path, monkeypatch):
    (tmp_path / "trainer").mkdir()
    bad = tmp_path / "trainer" / "bad.py"
    bad.write_text(
        "from ..inference.engine import Engine\nimport transformers.models\n"
        "from nopad.packing import build\n"
    )
    (tmp_path / "packing").mkdir()
    (tmp_path / "packing" / "build.py").write_text("")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert modules(bad) == [(("inference", "engine"), "Engine"), (("packing", "build"), "*")]
    assert libraries(bad) == ["transformers"]


def test_the_package_list_equals_the_tree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in sources(*ROOMS)}
    assert sorted(listed) == sorted(["nopad", *(".".join(["nopad", *f.parts]) for f in folders)])
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders)


def test_functions_stay_short():
    long = []
    for path in sources(*ROOMS, "benchmarks"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
                lines = node.end_lineno - node.lineno + 1
                is_script = path.parent.name == "recipes" and node.name == "train"
                if lines > (95 if is_script else 60):
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles it: a kernel is cut by what runs together, not by length."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_recipes_stay_short_enough_to_copy():
    lengths = {p.name: len(p.read_text().splitlines()) for p in ROOT.glob("recipes/*.py")}
    assert max(lengths.values()) <= 200, lengths
    support = [len(path.read_text().splitlines()) for path in ROOT.glob("recipes/support/*.py")]
    assert sum(support) <= 900


def test_every_module_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in sources(*ROOMS, "benchmarks", "tests")
        if not ast.get_docstring(parsed(path))
    ]
    assert not silent, silent


def test_no_file_hides_behind_a_general_name_or_shadows_a_module():
    banned = {"utils", "common", "helpers", "core", "config", "misc"}
    library = {"accelerate", "datasets", "torch", "transformers", "lightning", "triton", "numba"}
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources(*ROOMS, "benchmarks")
        if path.stem in banned | library | (set(sys.stdlib_module_names) - {"__init__"})
    ]
    assert not wrong, wrong


def test_no_code_is_loaded_from_data():
    banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    wrong = []
    for path in sources(*ROOMS):
        where = place(path)
        wrong += [f"{where} imports {name}" for name in libraries(path) if name in banned]
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                wrong += _unsafe_call(where, node)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "call",
    ["eval('1')", "yaml.load(f)", "torch.load(f)", "torch.load(f, weights_only=False)",
     "AutoModel.from_pretrained(name, trust_remote_code=True)", "AutoModel.from_pretrained(name)",
     "AutoModelForCausalLM.from_config(config, **options)"],
)  # fmt: skip
def test_the_reader_of_calls_sees_unsafe_ones(call):
    assert _unsafe_call("x.py", ast.parse(call, mode="eval").body)
    assert not _unsafe_call("x.py", ast.parse("torch.load(f, weights_only=True)", mode="eval").body)


def test_only_the_endpoint_listens_on_a_network():
    servers = {"http", "socket", "socketserver", "asyncio", "fastapi", "flask", "aiohttp",
               "starlette", "uvicorn"}  # fmt: skip
    found = {place(path) for path in sources(*ROOMS) for name in libraries(path) if name in servers}
    assert found == {"inference/endpoint/server.py", "inference/endpoint/request_queue.py"}


def _unsafe_call(where: str, node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name in ("eval", "exec", "yaml.load"):
        return [f"{where}:{node.lineno} calls {name}"]
    if name == "torch.load" and words.get("weights_only") != "True":
        return [f"{where}:{node.lineno} torch.load without weights_only=True"]
    if words.get("trust_remote_code") == "True":
        return [f"{where}:{node.lineno} trusts remote code"]
    # Without the argument, Transformers asks on standard input whether to run the code.
    asks = re.fullmatch(r"Auto\w+\.from_(pretrained|config)", name)
    if asks and words.get("trust_remote_code") != "False":
        return [f"{where}:{node.lineno} {name} without trust_remote_code=False"]
    return []


def test_importing_the_package_loads_nothing_heavy():
    heavy = ["torch", "transformers", "numba", "pyarrow", "datasets", "accelerate"]
    program = f"import sys, nopad; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_readme_names_both_commands():
    text = (ROOT / "README.md").read_text()
    assert "pip install -c constraints.txt -e . && accelerate launch recipes/pretrain.py" in text
    assert 'pip install -c constraints.txt -e ".[dev]" && pytest' in text
