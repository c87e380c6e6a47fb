"""`nopad generate` as a user runs it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm_python
from nopad.cli import generate
from nopad.cli.generate import main
from nopad.cli.prompt_file import read_prompts
from nopad.inference import Completion
from nopad.runtime import load_draw_counts


@pytest.fixture(scope="module")
def checkpoint() -> str:
    root = Path(os.environ.get("NOPAD_SHARED") or Path(__file__).parents[3] / "shared")
    folder = root / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip(reason=f"no model at {folder}; set NOPAD_SHARED")
    return str(folder)


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_prompts_of_the_command_line_come_back_completed(checkpoint, capsys):
    status = main(
        [checkpoint, "--prompt", "Once upon a time", "--prompt", "Lily", "--max-tokens", "9"]
    )
    done = lines(capsys.readouterr().out)
    assert status == 0 and [d["index"] for d in done] == [0, 1]
    assert [d["prompt"] for d in done] == ["Once upon a time", "Lily"]
    assert done[0]["text"].startswith(", there was") and len(done[0]["token_ids"]) == 9


def test_files_of_prompts_are_read_and_results_written(checkpoint, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once"}\n\n{"prompt": [1, 403, 407]}\n')
    out = tmp_path / "out.jsonl"
    given = ["--file", str(tmp_path / "in.jsonl"), "--output", str(out), "--max-tokens", "4"]
    trace = tmp_path / "trace.json"
    more = ["--n", "2", "--temperature", "0.9", "--logprobs", "1", "--trace", str(trace)]
    assert main([checkpoint, *given, *more]) == 0
    done = lines(out.read_text())
    assert [(d["index"], d["sample_index"]) for d in done] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [d["prompt"] for d in done[1:3]] == ["Once", [1, 403, 407]]
    assert all(len(d["logprobs"]) == len(d["token_ids"]) for d in done)
    assert json.loads(trace.read_text())["traceEvents"]


def test_files_at_home_are_found_and_new_folders_made(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "in.txt").write_text("Once\n")
    plots = ("plot.svg",) if find_spec("matplotlib") else ()
    names = ("output.jsonl", *plots, "trace.json")
    new = {f"--{name.split('.')[0]}": f"~/new/{name}" for name in names}
    given = [word for option in new.items() for word in option]
    assert main([checkpoint, "--file", "~/in.txt", "--max-tokens", "2", *given]) == 0
    written = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert written == list(names)


def test_a_failed_request_gives_status_1_and_the_others_their_text(checkpoint, capsys):
    status = main([checkpoint, "--prompt", "a" * 9000, "--prompt", "Once", "--max-tokens", "3"])
    done = lines(capsys.readouterr().out)
    assert status == 1 and "max_model_len" in done[0]["error"] and done[1]["text"]


def test_mistakes_are_said_in_one_line(checkpoint, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    for wrong in (
        [checkpoint],
        [checkpoint, "--file", str(tmp_path / "bad.jsonl")],
        [str(tmp_path), "--prompt", "a"],
        [checkpoint, "--prompt", "a", "--temperature", "-1"],
    ):
        with pytest.raises(ValueError, match=r"\w") as caught:
            main(wrong)
        assert "\n" not in str(caught.value)


def test_empty_lines_of_a_file_are_no_prompts(tmp_path):
    (tmp_path / "in.txt").write_text("Once\n\n  \n Lily\n")
    asked = [prompt for prompt, _ in read_prompts(str(tmp_path / "in.txt"))]
    assert asked == ["Once", " Lily"]


def test_too_little_memory_is_told_in_words_of_the_command_line(checkpoint):
    with pytest.raises(ValueError, match=r"^--memory 10 leaves 10 bytes.*: allow more memory$"):
        main([checkpoint, "--prompt", "Once", "--memory", "10"])


def test_lines_of_standard_input_are_prompts(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon\nLily\n"))
    assert main([checkpoint, "--file", "-", "--max-tokens", "5", "--text"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.strip() == "a time, there was" and second


def test_a_record_brings_its_own_settings(checkpoint, tmp_path, capsys):
    records = [{"prompt": "Once", "max_tokens": 2, "answer": "x"}, {"prompt": "Once"}, "Once",
               {"prompt": "Once", "logit_bias": {"7": 100}, "max_tokens": 1}]  # fmt: skip
    (tmp_path / "in.json").write_text(json.dumps(records))
    assert main([checkpoint, "--file", str(tmp_path / "in.json"), "--max-tokens", "4"]) == 0
    done = [entry["token_ids"] for entry in lines(capsys.readouterr().out)]
    assert [len(tokens) for tokens in done] == [2, 4, 4, 1]
    assert done[1] == done[2] and done[1][:2] == done[0] and done[3] == [7]


def test_standard_input_may_be_json_lines(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "Once", "min_tokens": 20}\n'))
    assert main([checkpoint, "--file", "-", "--jsonl", "--max-tokens", "20"]) == 0
    assert len(lines(capsys.readouterr().out)[0]["token_ids"]) == 20


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "top_p": 2}', r"a.jsonl, line 2: top_p is 2"),
        ("a.jsonl", '{"prompt": "a", "logit_bias": {"b": 1}}', "line 1: logit_bias"),
        ("a.json", '{"prompt": "a"}', "is not a list of prompts; use .jsonl"),
        ("a.json", '["a", {"text": "b"}]', 'entry 2: has neither "prompt" nor "messages"'),
        ("a.json", "[", r"a.json: not JSON \("),
        ("missing.txt", None, "missing.txt: there is no such file"),
        ("a.jsonl", '{"prompt": "a", "messages": [{}]}', 'line 1: has both "prompt" and'),
        ("a.jsonl", '{"messages": [5]}', 'line 1: "messages" must be a list of objects'),
        ("a.jsonl", '{"prompt": null}', "line 1: a prompt is text, a list of token ids or"),
        ("a.jsonl", '{"prompt": [true]}', "line 1: a prompt is text, a list of token ids or"),
        ("a.jsonl", '{"prompt": "a", "min_tokens": 999}', "prompt 0: min_tokens 999 exceeds"),
        ("a.jsonl", "[" * 100_000, "line 1: JSON is nested too deeply"),
        (
            "a.jsonl",
            f'{{"prompt": "a", "n": {"9" * 5000}}}',
            "line 1: a number has too many digits",
        ),
    ],
)
def test_a_wrong_entry_is_named(tmp_path, name, text, told):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=told):
        main(["m", "--file", str(tmp_path / name)])


def test_the_format_of_a_file_is_what_its_name_or_the_option_says(tmp_path):
    entries = [("a", {}), ("b", {})]
    (tmp_path / "a.JSONL").write_bytes(b'\xef\xbb\xbf"a"\r\n"b"\r\n')
    assert read_prompts(str(tmp_path / "a.JSONL")) == entries
    (tmp_path / "a.json").write_text('"a"\n"b"\n')
    assert read_prompts(str(tmp_path / "a.json"), is_jsonl=True) == entries
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\nb\n")
    assert read_prompts(str(tmp_path / "a.txt")) == entries
    with pytest.raises(ValueError, match="is a folder: pass a file in it"):
        read_prompts(str(tmp_path))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_standard_input_end_as_those_of_a_file(tmp_path, monkeypatch, end):
    content = end.join(["Once upon", "Lily", ""]).encode()
    (tmp_path / "a.txt").write_bytes(content)
    stdin = io.TextIOWrapper(io.BytesIO(content), newline="\n")  # as Python opens it
    monkeypatch.setattr(sys, "stdin", stdin)
    entries = [("Once upon", {}), ("Lily", {})]
    assert read_prompts("-") == read_prompts(str(tmp_path / "a.txt")) == entries


@pytest.mark.parametrize(
    ("field", "meant"),
    [("max_token", "max_tokens"), ("max_new_tokens", "max_tokens"), ("maxTokens", "max_tokens"),
     ("temprature", "temperature"), ("top-p", "top_p"), ("logprob", "logprobs")],
)  # fmt: skip
def test_a_misspelled_parameter_is_refused_with_the_right_name(tmp_path, field, meant):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", field: 1}) + "\n")
    with pytest.raises(ValueError, match=f'line 1: unknown field "{field}": did you .* "{meant}"'):
        read_prompts(str(tmp_path / "a.jsonl"))


def test_other_fields_of_a_prompt_are_ignored(tmp_path):
    row = {"prompt": "a", "prompt_id": 1, "answer": "b", "id": 3, "step": 4, "max_tokens": 2}
    row |= {"max_token_limit": 9, "messages": None}  # max_tokens is there: no misspelling of it
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert read_prompts(str(tmp_path / "a.jsonl")) == [("a", {"max_tokens": 2})]


def test_closed_standard_input_and_a_format_without_a_file_are_told(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed"):
        main(["m", "--file", "-"])
    with pytest.raises(ValueError, match="--jsonl needs --file"):
        main(["m", "--prompt", "a", "--jsonl"])


def test_log_probabilities_of_the_prompt_are_written_if_asked_for(checkpoint, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 403, 407], "prompt_logprobs": 1}\n')
    assert main([checkpoint, "--file", str(tmp_path / "in.jsonl"), "--max-tokens", "1"]) == 0
    first, *others = lines(capsys.readouterr().out)[0]["prompt_logprobs"]
    assert first is None and len(others) == 2 and all(value < 0 for value in others)


def test_a_full_disk_does_not_lose_the_completions(checkpoint, capsys):
    if not Path("/dev/full").exists():
        pytest.skip(reason="no /dev/full")
    with pytest.raises(ValueError, match="the completions are on standard output"):
        main([checkpoint, "--prompt", "Once", "--max-tokens", "2", "--output", "/dev/full"])
    assert len(lines(capsys.readouterr().out)[0]["token_ids"]) == 2


def test_bytes_of_standard_input_that_are_no_utf8_are_told(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "latin-1"))
    with pytest.raises(ValueError, match="standard input is not UTF-8"):
        main(["m", "--file", "-"])


def test_a_prompt_given_twice_is_answered_twice(checkpoint, capsys):
    given = [checkpoint, *["--prompt", "Once upon"] * 3, "--temperature", "1", "--max-tokens", "24"]
    answers = []
    for seed in ("0", "0", "1"):
        load_draw_counts({})  # as in a new process
        assert main([*given, "--seed", seed]) == 0
        answers.append([tuple(done["token_ids"]) for done in lines(capsys.readouterr().out)])
    assert len(set(answers[0])) == 3 and answers[0] == answers[1] != answers[2]


def test_ids_need_no_tokenizer_and_text_says_that_it_does(checkpoint, tmp_path, capsys):
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(Path(checkpoint) / name, tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 403, 407]}\n')
    assert main([str(tmp_path), "--file", str(tmp_path / "in.jsonl"), "--max-tokens", "4"]) == 0
    (done,) = lines(capsys.readouterr().out)
    assert done["text"] is None and len(done["token_ids"]) == 4
    with pytest.raises(ValueError, match="no readable tokenizer; pass one"):
        main([str(tmp_path), "--prompt", "Once"])
    named = ["--tokenizer", checkpoint, "--max-tokens", "4"]
    assert main([str(tmp_path), "--prompt", "Once upon", *named]) == 0
    assert "a time" in capsys.readouterr().out


def test_alternatives_that_were_asked_for_are_written(checkpoint, capsys):
    assert main([checkpoint, "--prompt", "Once", "--logprobs", "2", "--max-tokens", "3"]) == 0
    (done,) = lines(capsys.readouterr().out)
    assert [len(top) for top in done["top_logprobs"]] == [2, 2, 2]
    best = [max(top.values()) for top in done["top_logprobs"]]
    assert best == pytest.approx(done["logprobs"]), "greedy takes the likeliest"


def test_texts_become_chats(checkpoint_dir, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "Lily"}]}\n')
    given = [str(checkpoint_dir), "--prompt", "Lily", "--file", str(tmp_path / "in.jsonl")]
    assert main([*given, "--chat", "--max-tokens", "4"]) == 0
    first, second = lines(capsys.readouterr().out)
    assert first["token_ids"] == second["token_ids"], "the flag and the file say the same chat"


def test_chat_without_a_template_is_told_before_the_model_is_loaded(checkpoint, monkeypatch):
    monkeypatch.setattr(generate, "load_model", None)
    with pytest.raises(ValueError, match="--chat: the tokenizer has no chat template"):
        main([checkpoint, "--prompt", "Lily", "--chat"])


@pytest.mark.parametrize("name", ["bad.txt", "bad.jsonl"])
def test_a_file_that_is_not_utf8_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=rf"{name} is not UTF-8") as caught:
        main(["m", "--file", str(tmp_path / name)])
    assert type(caught.value) is ValueError


def test_messages_for_a_tokenizer_without_a_template_are_refused(checkpoint, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "Lily"}]}\n')
    with pytest.raises(ValueError, match="prompt 0: messages need a chat template"):
        main([checkpoint, "--file", str(tmp_path / "in.jsonl")])


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (["--device", "frog"], "frog"),
        (["--n", "3"], "temperature"),
        (["--n", "3", "--temperature", "1e-6"], "temperature"),
        (["--memory", "10"], "memory"),
    ],
)
def test_a_setting_that_cannot_be_is_named(checkpoint, wrong, word):
    with pytest.raises(ValueError, match=word):
        main([checkpoint, "--prompt", "a", *wrong])


@pytest.mark.parametrize(
    "wrong",
    [["--output", "."], ["--trace", "."], ["--dtype", "float99"], ["--memory", "abc"]],
)
def test_what_could_not_be_written_or_read_ends_before_any_work(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["no-such-model", "--prompt", "a", *wrong])
    assert ended.value.code == 2 and wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "word"),
    [("/no/such/folder", "there is no folder"), ("", "config.json"), ("x.txt", "is a file")],
)
def test_what_is_no_checkpoint_is_told_so(tmp_path, name, word):
    (tmp_path / "x.txt").touch()
    with pytest.raises(ValueError, match=word):
        main([str(tmp_path / name), "--prompt", "a"])


HEAVY = {"torch", "transformers", "lm_eval", "numpy", "numba", "accelerate", "lightning", "rich"}


def test_help_of_every_command_and_recipe_is_quick():
    """Nothing that takes long to import is loaded; one process tells it of all of them."""
    program = """
import io, runpy, sys
from contextlib import redirect_stdout, suppress
from nopad.__main__ import COMMANDS, RECIPES, main
for name in (*COMMANDS, *RECIPES):
    with suppress(SystemExit), redirect_stdout(io.StringIO()) as out:
        main([name, "--help"])
    assert f"usage: nopad {name}" in out.getvalue(), name
    print(name, *sys.modules.keys() & set(sys.argv[1:]))
"""
    command = [sys.executable, "-c", program, *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = {name: modules for name, *modules in map(str.split, done.stdout.splitlines())}
    assert loaded and not any(loaded.values()), loaded


def test_the_command_runs_as_a_process(checkpoint):
    command = ["-m", "nopad", "generate", checkpoint, "--prompt", "Once"]
    run = warm_python.run([*command, "--max-tokens", "3", "--stats"], cwd=Path.home())
    assert run.returncode == 0 and len(lines(run.stdout)) == 1
    assert '"new_tokens": 3' in run.stderr


def test_escape_sequences_of_a_completion_are_shown_not_sent(tmp_path, monkeypatch, capsys):
    said = "a\x1b[2J\x9bb\n"

    class FakeEngine:
        def generate(self, prompts, *_, **__):
            return [Completion(token_ids=[1], text=said, finish_reason="stop") for _ in prompts]

    monkeypatch.setattr("nopad.cli.generate._engine", lambda *_, **__: FakeEngine())
    assert main(["x", "--prompt", "a"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x9b" not in out and lines(out)[0]["text"] == said
    assert main(["x", "--prompt", "a", "--text"]) == 0
    assert capsys.readouterr().out == "a\\u001b[2J\\u009bb\n\n"
    assert main(["x", "--prompt", "a", "--text", "--output", str(tmp_path / "o.txt")]) == 0
    assert (tmp_path / "o.txt").read_text() == said + "\n"


def test_a_terminal_shows_prompts_and_texts_for_people(checkpoint, terminal, capsys):
    assert main([checkpoint, "--prompt", "Once upon a time", "--max-tokens", "9"]) == 0
    out = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert out.startswith("Once upon a time, there was") and "\n9 tokens, length\n" in out
    given = ["--max-tokens", "2", "--temperature", "1", "--n", "2"]
    assert main([checkpoint, "--prompt", "[bold]a", *given]) == 0
    assert capsys.readouterr().out.count("[bold]a") == 2, "brackets of a prompt are no style"


def test_a_terminal_is_not_sent_the_escape_sequences_of_a_completion(monkeypatch, terminal, capsys):
    said = Completion(token_ids=[1], text="a\x1b[2J\x9bb", finish_reason="stop")
    chat = [{"role": "user", "content": "\x1b]52;c;aGk=\x07"}]
    generate._print_completions(generate.console(), [chat, [5, 6]], [said, said])
    out = capsys.readouterr().out
    assert r"a\u001b[2J\u009bb" in out and "]52;c" in out and "5 6 " in out
    assert "\x1b[2J" not in out and "\x9b" not in out and "\x07" not in out
