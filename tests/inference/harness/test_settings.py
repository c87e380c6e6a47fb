"""A Harness checks its arguments when it is built, and does not modify them."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

import lm_tasks
from nopad.inference.harness import Harness
from small_checkpoint import random_model, small_tokenizer


@pytest.fixture(scope="module")
def small():
    tokenizer = small_tokenizer()
    return random_model(tokenizer), tokenizer


@pytest.fixture
def write(tmp_path):
    """A generation task as a dict, for tasks without a file."""
    lm_tasks.write_tasks(tmp_path, 4)
    return {
        "task": "tiny_write",
        "output_type": "generate_until",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"max_gen_toks": 8, "temperature": "0"},
        "metric_list": [{"metric": "exact_match"}],
    }


WRONG = [
    ({"temprature": 0.7}, r"^tiny_write: generation setting 'temprature' is not supported"),
    (
        {"max_gen_toks": 100_000},
        r"^tiny_write: max_gen_toks is 100000, which leaves no tokens .* 256",
    ),
    ({"do_sample": True, "temperature": 1, "top_p": 2}, r"^tiny_write: top_p is 2; it must lie"),
    ({"temperature": None}, "^tiny_write: .*NoneType"),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG)
def test_settings_that_cannot_be_followed_are_told_when_it_is_built(small, write, wrong, told):
    with pytest.raises(ValueError, match=told):
        harness(small, [write], gen_kwargs=wrong)


def test_task_settings_that_cannot_be_followed_are_told(small, write):
    write["generation_kwargs"]["num_beams"] = 4
    with pytest.raises(
        ValueError, match=r"^tiny_write: num_beams is 4: beam search is not supported"
    ):
        harness(small, [write])
    harness(small, [write], gen_kwargs={"num_beams": 1})


def test_settings_in_a_line_are_refused(small, write):
    with pytest.raises(ValueError, match="gen_kwargs is 'max_gen_toks=2'; pass a dict"):
        harness(small, [write], gen_kwargs="max_gen_toks=2")


def test_a_task_that_was_given_stays_as_it_was(small, write):
    before = copy.deepcopy(write)
    _samples(harness(small, [write], limit=1, gen_kwargs={"max_gen_toks": 2}), 2)
    assert write == before
    _samples(harness(small, [write], limit=1), 8)


def test_numbers_may_be_numpys(small, write):
    numbers = {"limit": np.int64(2), "num_fewshot": np.int32(0)}
    built = harness(small, [write], gen_kwargs={"max_gen_toks": np.int64(2)}, **numbers)
    assert len(_samples(built, 2)) == 2


def harness(small, tasks: list, **settings) -> Harness:
    """Return a Harness that does not index lm_eval's own tasks: that takes seconds."""
    return Harness(*small, tasks, include_path=str(Path(__file__).parent), **settings)


def _samples(built: Harness, tokens: int) -> list:
    """Return the samples of its task, after checking their max_gen_toks."""
    samples = built.results(samples=True)["samples"]["tiny_write"]
    assert all(sample["arguments"][0][1]["max_gen_toks"] == tokens for sample in samples)
    return samples
