"""Held-out rows are never trained on, by any rank or shard, and are evaluated by default."""

from __future__ import annotations

import gzip
import json
import os
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_inputs
import warm_python
from char_words import char_tokenizer
from nopad.packing import PackedDataset
from nopad.packing.sources import open_source
from nopad.recipes import pretrain
from nopad.recipes.support import data_and_model, holdout, stdlib_corpus
from nopad.trainer.evaluation.generation_eval import RESERVED_NAMES

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize(("shards", "count"), [(1, 1000), (3, 1000), (1, 2)])
def test_rows_are_trained_on_or_held_out_never_both(tmp_path, shards, count):
    path = small_inputs.chats(tmp_path, 400)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    source, examples = holdout.hold_out(open_source(path), count)
    trained = [row.value for s in range(shards) for row in source.read(s, shards)]
    kept = [row for row in rows if holdout.row_example(row) not in examples]
    assert sorted(map(json.dumps, trained)) == sorted(map(json.dumps, kept))
    assert 0 < len(examples) == len(rows) - len(kept) <= min(count, 39)
    assert all(example.prompt[-1]["role"] == "user" for example in examples)


def test_rows_without_an_answer_are_all_trained_on(tmp_path):
    path = small_inputs.documents(tmp_path, 200)
    source, examples = holdout.hold_out(open_source(path), 32)
    assert examples == [] and len(list(source.read(0, 1))) == 200
    opened = open_source(path)
    assert holdout.hold_out(opened, 0) == (opened, [])


@pytest.mark.parametrize("column", ["text", "body"])
def test_texts_are_held_out_too_and_continued_from_their_beginnings(tmp_path, column, monkeypatch):
    texts = [f"{number:03} " + f"{number} words and more " * (number % 20) for number in range(900)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    args = pretrain.parse_args(["--data", str(path), "--text-column", column, "--budget", "256"])
    monkeypatch.setattr(stdlib_corpus, "documents", lambda: (texts, []))  # for the tokenizer
    tokenizer, packs, examples = data_and_model.load_data(args)
    beginnings = {example.prompt + example.reference for example in examples}
    held = [text for text in texts if text[:200] in beginnings]
    assert 0 < len(examples) == len(held) <= 32 and min(map(len, held)) > 200
    one_pass = islice(packs, packs.count())
    trained = "".join(tokenizer.decode(pack.tokens.tolist()) for pack in one_pass)
    assert not any(example.prompt in trained for example in examples)
    assert sum(text[:200] in trained for text in texts if len(text) > 200) > 100


@pytest.mark.parametrize("rows", [2, 10, 60])
def test_a_small_set_has_one_row_held_out_whatever_its_content(tmp_path, rows):
    for seed in range(5):
        chats = [{"prompt": f"{seed} {row}", "completion": str(row)} for row in range(rows)]
        examples = holdout.pick_examples(chats, 32)
        assert 1 <= len(examples) < max(2, rows // 5)
        assert holdout.pick_examples(chats[::-1], 32).keys() == examples.keys()
    assert holdout.pick_examples(chats[:1] * 9, 32) == {}


def test_data_without_text_is_not_evaluated_and_told_so(capsys):
    assert holdout.continuation_evals(SimpleNamespace(data="ids.bin"), None, None, []) == []
    assert "no evaluation: ids.bin has fewer than two rows of text" in capsys.readouterr().out


def test_data_without_answers_is_not_read_to_its_end():
    rows = iter(range(10**6))
    assert holdout.pick_examples(rows, 2) == {} and next(rows) == 400


def test_the_fingerprint_depends_on_the_excluded_rows(tmp_path):
    path = small_inputs.chats(tmp_path, 400)
    prints = {holdout.hold_out(open_source(path), count)[0].fingerprint() for count in (1, 2, 2)}
    assert len(prints) == 2


def test_tokens_without_held_out_rows_are_cached(tmp_path, monkeypatch):
    rows = [{"text": "abcde"[: n % 5 + 1] * (n % 7 + 1)} for n in range(40)]
    path, read = tmp_path / "rows.jsonl", []
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    all_rows = open_source(path)
    source = holdout.ExcludingRows(all_rows, [holdout.row_digest(next(all_rows.read(0, 1)).value)])
    settings = {"tokenizer": char_tokenizer(), "budget": 64, "cache_dir": tmp_path / "cache"}
    uncached = PackedDataset(source, **{**settings, "cache_dir": False})
    first = PackedDataset(source, **settings)
    monkeypatch.setattr(holdout, "row_digest", lambda row: read.append(row) or "")
    again = PackedDataset(source, **settings)
    expected = [pack.tokens.tolist() for pack in uncached]
    assert read == [] and [pack.tokens.tolist() for pack in again] == expected
    assert [pack.tokens.tolist() for pack in first] == expected
    everything = PackedDataset(all_rows, **settings)
    assert sum(len(pack.tokens) for pack in everything) > sum(map(len, expected))


def test_a_compressed_stream_without_held_out_rows_is_read_once_to_its_place(tmp_path):
    path = small_inputs.documents(tmp_path, 400)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    excluded = holdout.ExcludingRows(open_source(packed), [])
    assert excluded.sequential_only and excluded.paths == [packed]
    assert [row.value for row in excluded.read(0, 1)] == list(
        map(json.loads, path.read_text().splitlines())
    )


@pytest.mark.parametrize("turns", ["hello", 7, [1, 2], [["a"], ["b"]], None, {"role": "user"}])
def test_a_malformed_conversation_is_not_an_example(turns):
    assert holdout.row_example({"messages": turns}) is None


@pytest.mark.parametrize(("reference", "names"), [(None, []), (" time", ["matched"])])
def test_prompts_without_a_reference_are_not_scored(monkeypatch, reference, names):
    from nopad.trainer.evaluation import Example

    class FakeEngine:
        def __init__(self, engine):
            pass

        def generate(self, prompts, params, deadline=None):
            return [SimpleNamespace(text=" up", token_ids=[1], error=None, finish_reason="eos")]

    monkeypatch.setattr("nopad.inference.DataParallelEngine", FakeEngine)
    monkeypatch.setattr("nopad.inference.Engine", lambda model, tokenizer: None)
    args = SimpleNamespace(data="a.jsonl", eval_every=1, seed=0)
    [evaluation] = holdout.continuation_evals(args, None, None, [Example("Once", reference)])
    metrics = [name.removeprefix("eval/") for name in evaluation.run(1).metrics]
    assert [name for name in metrics if name not in RESERVED_NAMES] == names


def test_fine_tuning_evaluates_by_default(tmp_path):
    argv = [small_inputs.checkpoint(tmp_path)]
    argv += ["--tokenizer", small_inputs.tokenizer(tmp_path)]
    argv += ["--data", small_inputs.chats(tmp_path, 60), "--budget", "64", "--steps", "3"]
    command = [RECIPES / "sft.py", *argv, "--output", tmp_path / "out"]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = warm_python.run(command, env=env, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "eval_matched" in done.stdout and "after 3 steps:" in done.stdout + done.stderr
