"""Tests of the tests: nothing is retried, order is compared, exit codes are read.

And `README.md` names for every promise a test that shows it, and a fault it was seen to fail on.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
COUNTS = {"A": 65, "B": 27, "C": 9, "D": 10, "E": 5, "F": 11, "G": 16, "H": 5, "I": 15}
LINES = [f"{letter}{n}" for letter, last in COUNTS.items() for n in range(1, last + 1)]
SMOKE = [
    "packed ≡ one by one", "resumed ≡ uninterrupted", "engine ≡ generate", "no trace",
    "HF Trainer", "TRL", "Accelerate", "Lightning", "order", "refusals",
]  # fmt: skip
PRIVATE = {
    "_deliver", "_drive", "_driver", "_exit_with_parent", "_file_stamps", "_http_status",
    "_image_samples", "_join", "_read_records", "_rollout_seed", "_runs_eagerly",
    "_sampling_params", "_subclass",
}  # fmt: skip
"""Private names of ours that seeded faults replace; the list may only shrink."""
INHERITED = {"_get_num_items_in_batch", "_global_forward_hooks", "_track_num_input_tokens"}
"""Those of torch and Transformers."""
UNORDERED = {"set", "sorted", "len", "sum", "Counter", "frozenset", "any", "all"}
STARTS = {
    f"{module}.{name}" for module in ("subprocess", "warm_python") for name in ("run", "Popen")
}
MODULE = r"(?:subprocess|warm_python)"
HANDS_ON = rf"-> .*{MODULE}\.|return {MODULE}\.run|append\(\s*{MODULE}\.Popen"
RESUMES = re.compile(r"resum|restor|continu|kill|goes_on|go_on")


def files() -> list[Path]:
    return sorted(TESTS.rglob("*.py"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def calls(tree: ast.AST) -> set[str]:
    """Everything that is called, as it is written."""
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def unread_exits(source: str) -> list[str]:
    """Functions that start a process and do not look at how it ended.

    One that hands the finished process on leaves that to whoever calls it.
    """
    if not re.search(MODULE, source):
        return []
    tree = ast.parse(source)
    handing, wrong = set(), []
    for function in functions(tree):
        text = ast.unparse(function)
        if not calls(function) & STARTS:
            continue
        if "returncode" in text or "check=True" in text or ".wait(" in text:
            continue
        if re.search(HANDS_ON, text):
            handing.add(function.name)
        else:
            wrong.append(function.name)
    for function in functions(tree):
        text = ast.unparse(function)
        if calls(function) & handing and not re.search(r"returncode|_result\(|\.wait\(", text):
            wrong.append(function.name)
    return wrong


def unordered_resumes(source: str) -> list[str]:
    """Tests of a resume in which no assertion compares content in its order."""
    wrong = []
    for function in functions(ast.parse(source)):
        if not function.name.startswith("test_") or not RESUMES.search(function.name):
            continue
        asserts = [node for node in ast.walk(function) if isinstance(node, ast.Assert)]
        if asserts and not any(_ordered(node.test) for node in asserts):
            wrong.append(function.name)
    return wrong


def _ordered(test: ast.expr) -> bool:
    compares = [node for node in ast.walk(test) if isinstance(node, ast.Compare)]
    return any(not calls(compare) & UNORDERED for compare in compares)


def promises(text: str) -> dict[str, list[str]]:
    """The cells of the table, by the promise's number."""
    rows = [line.strip("| ").split("|") for line in text.splitlines()]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {row[0]: row[1:] for row in cells if re.fullmatch(r"[A-I]\d+", row[0])}


def missing(cell: str) -> list[str]:
    """What a cell names that is not there: `file`, `file::test`, or `file` *text in it*."""
    named = re.findall(r"(?:`([^`]+)`)? ?(?:\*([^*]+)\*)?", cell)
    wrong = []
    for place, text in named:
        file, _, test = (place or "test_seen_to_fail.py").partition("::")
        source = (TESTS / file).read_text() if (TESTS / file).is_file() else ""
        lacks = test and f"def {test}(" not in source
        if (place or text) and (not source or lacks or text not in source):
            wrong.append(f"{place} {text}".strip())
    return wrong


def test_every_promise_names_tests_and_faults_that_are_there():
    table = promises((TESTS / "README.md").read_text())
    assert list(table) == LINES
    for number, (promise, shown, longer, fault) in table.items():
        assert promise and shown and fault, f"{number} is not shown, or was never seen to fail"
        assert missing(shown) + missing(longer) + missing(fault) == [], number


def test_what_is_longer_is_marked_so():
    table = promises((TESTS / "README.md").read_text())
    for place in re.findall(r"`([^`]+)::", " ".join(row[2] for row in table.values())):
        assert re.search(r"mark\.(slow|gpu)", (TESTS / place).read_text()), place


def test_faults_replace_public_names():
    tree = ast.parse((TESTS / "test_seen_to_fail.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    (faults,) = (n.value for n in assigned if {ast.unparse(t) for t in n.targets} == {"FAULTS"})
    replaced: set[str] = set()
    for _, _, code in ast.literal_eval(faults).values():
        for node in ast.walk(ast.parse(code)):
            targets = node.targets if isinstance(node, ast.Assign) else ()
            replaced |= {ast.unparse(target).rpartition(".")[2] for target in targets}
            replaced |= {node.name} if isinstance(node, ast.FunctionDef) else set()
    assert {n for n in replaced if re.match(r"_[a-z]", n)} - PRIVATE - INHERITED == set()


def test_every_promise_of_the_smoke_tests_has_one():
    shown: dict[str, str] = {}
    for path in files():
        for promises in re.findall(r"mark\.smoke\(([^)]*)\)", path.read_text()):
            shown |= dict.fromkeys(re.findall(r'"([^"]+)"', promises), path.name)
    assert sorted(shown) == sorted(SMOKE)
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
    assert "smoke" in str(project["tool"]["pytest"]["ini_options"]["markers"])


def test_nothing_is_tried_again():
    words = re.compile(r"mark\.flaky|reruns|rerunfailures|@retry|flaky\(")
    others = [path for path in files() if path != Path(__file__)]
    assert [path.name for path in others if words.search(path.read_text())] == []
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
    assert not words.search(str(project))


def test_every_started_process_has_its_exit_code_read():
    found = {p.name: bad for p in files() if (bad := unread_exits(p.read_text()))}
    assert found == {}


def test_resumed_content_is_compared_in_its_order():
    found = {p.name: bad for p in files() if (bad := unordered_resumes(p.read_text()))}
    assert found == {}


def test_these_readers_see_what_they_are_for():
    silent = "def test_x():\n    subprocess.run(['false'])\n"
    assert unread_exits(silent) == ["test_x"]
    assert unread_exits(silent.replace("subprocess", "warm_python")) == ["test_x"]
    handed = "def go():\n    return subprocess.run(['x'])\ndef test_y():\n    assert go().stdout\n"
    assert unread_exits(handed) == ["test_y"]
    table = "| | promise |\n|---|---|\n| A1 | it holds | `x.py::test_y` | | *a fault* |\n"
    assert promises(table) == {"A1": ["it holds", "`x.py::test_y`", "", "*a fault*"]}
    here = "`test_tests.py::test_nothing_is_tried_again`"
    assert missing(f"{here}, `test_tests.py` *mark*, *prompts are logged*") == []
    wrong = ["test_tests.py::test_z", "x.py", "no such fault"]
    assert missing("`test_tests.py::test_z`, `x.py`, *no such fault*") == wrong
    counted = "def test_a_resumed_run():\n    assert len(a) == len(b) and set(a) == set(b)\n"
    assert unordered_resumes(counted) == ["test_a_resumed_run"]
    assert unordered_resumes(counted.replace("len(a) == len(b)", "a == b")) == []
