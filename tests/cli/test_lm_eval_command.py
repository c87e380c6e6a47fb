"""The engine under lm_eval's own name for models, from its command line and from Python."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")


def test_lm_eval_takes_the_engine_by_name_and_scores_as_its_own_model(checkpoint_dir, tmp_path):
    import nopad.cli.lm_eval_command  # noqa: F401
    from lm_eval.tasks import TaskManager
    from lm_tasks import write_tasks

    names = write_tasks(tmp_path, 6)

    def scores(model: str, **args):
        return lm_eval.simple_evaluate(
            model=model,
            model_args={"pretrained": str(checkpoint_dir), "dtype": "float32", **args},
            tasks=names,
            limit=4,
            device="cpu",
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
        )["results"]

    ours, theirs = scores("nopad", max_num_seqs=8), scores("hf")
    assert set(ours) == set(names)
    for name in names:
        numbers = {k: v for k, v in theirs[name].items() if isinstance(v, float)}
        assert numbers and {k: ours[name][k] for k in numbers} == pytest.approx(numbers, rel=1e-5)


def test_add_bos_token_is_that_of_lm_evals_own_model(tmp_path):
    from lm_eval.models.huggingface import HFLM
    from nopad.cli.lm_eval_command import CheckpointLM
    from small_checkpoint import metaspace_tokenizer, random_model

    tokenizer = metaspace_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    random_model(tokenizer).save_pretrained(tmp_path)
    encoded = []
    for add_bos_token in (None, True, False):
        arguments = f"pretrained={tmp_path}" + (
            "" if add_bos_token is None else f",add_bos_token={add_bos_token}"
        )
        ours, theirs = (
            model.create_from_arg_string(arguments, {"device": "cpu"})
            for model in (CheckpointLM, HFLM)
        )
        for text in ("Lily saw", "<s>Lily saw"):
            encoded.append(ours.tok_encode(text))
            assert encoded[-1] == theirs.tok_encode(text)
            assert encoded[-1] == ours.generation_request(text, {"max_gen_toks": 4})[0]
    assert encoded[2] != encoded[4], "the setting shows"


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"pretrained": None}, "pass pretrained="),
        ({"max_num_seq": 8}, "'max_num_seq' is no argument"),
        ({"max_length": "abc"}, "max_length is 'abc'; it must be an integer"),
    ],
)
def test_model_args_that_are_wrong_are_told_in_a_line(checkpoint_dir, wrong, word):
    from nopad.cli.lm_eval_command import CheckpointLM

    with pytest.raises(ValueError, match=word):
        CheckpointLM(**{"pretrained": str(checkpoint_dir), **wrong})


def test_where_several_processes_run_the_other_command_is_named(monkeypatch):
    from nopad.cli.lm_eval_command import main

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="nopad eval"):
        main(["--help"])


@pytest.mark.slow
def test_lm_evals_own_command_line_runs_it(checkpoint_dir, tmp_path):
    from lm_tasks import write_tasks

    names = write_tasks(tmp_path, 6)
    done = subprocess.run(
        [
            sys.executable, "-m", "nopad", "lm_eval", "--model", "nopad",
            "--model_args", f"pretrained={checkpoint_dir}", "--tasks", ",".join(names),
            "--include_path", str(tmp_path), "--limit", "4",
        ],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|tiny_choice|" in done.stdout.replace(" ", "")
