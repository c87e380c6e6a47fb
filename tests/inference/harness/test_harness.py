"""lm_eval's tasks by the engine give what its own `hf` model gives, and leave no trace (C3)."""

from __future__ import annotations

import copy
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")

import lm_tasks  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from nopad.inference.execution.sampler import gather_logprobs  # noqa: E402
from nopad.inference.harness import EngineLM, Harness  # noqa: E402
from small_checkpoint import (  # noqa: E402
    CHAT,
    metaspace_tokenizer,
    random_model,
    small_tokenizer,
)

LAST = """task: tiny_last
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
target_delimiter: ""
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture(scope="module")
def small():
    tokenizer = small_tokenizer()
    return random_model(tokenizer), tokenizer


@pytest.fixture(scope="module")
def stories(shared):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shared / "models" / "stories260k"
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return folder, lm_tasks.write_tasks(folder, 200)


def both(pair, folder: Path, names: list[str], limit: int, chat: bool = False, **settings):
    """Run the same tasks with our engine and with lm_eval's own model; return both results."""
    torch.set_num_threads(1)
    model, tokenizer = pair
    harness = Harness(
        model, tokenizer, names, limit=limit, chat=chat, include_path=str(folder), **settings
    )
    ours = harness.results(samples=True)
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=16, device="cpu"),
        tasks=names,
        limit=limit,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        bootstrap_iters=1000,
    )
    return ours, theirs


def assert_equal(ours: dict, theirs: dict) -> int:
    """Check predictions, flags, metrics, log-likelihoods to 1e-4; return the number of answers."""
    answers = 0
    for name, samples in theirs["samples"].items():
        our_samples = sorted(ours["samples"][name], key=lambda s: s["doc_id"])
        for a, b in zip(our_samples, sorted(samples, key=lambda s: s["doc_id"]), strict=True):
            assert a["arguments"] == b["arguments"]
            for (x,), (y,) in zip(a["resps"], b["resps"], strict=True):
                answers += 1
                if isinstance(y, str):
                    assert x == y
                elif isinstance(y, tuple):
                    assert abs(x[0] - y[0]) < 1e-4 and x[1] == y[1]
                else:  # the sum over a text
                    assert abs(x - y) < 1e-4 + 1e-6 * abs(y)
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == pytest.approx(value, rel=1e-5), metric
    return answers


def test_scores_equal_those_of_lm_evals_own_model(small, tasks):
    folder, names = tasks
    assert assert_equal(*both(small, folder, names, 12)) == 6 * 12


def test_scores_of_a_real_model_are_equal(stories, tasks):
    folder, names = tasks
    assert assert_equal(*both(stories, folder, names, 12)) == 6 * 12


@pytest.mark.slow
def test_scores_of_a_real_model_are_equal_on_200_documents(stories, tasks):
    folder, names = tasks
    assert assert_equal(*both(stories, folder, names, 200)) == 6 * 200


def test_over_a_wide_vocabulary_the_rounding_is_that_of_lm_evals_softmax():
    """torch's float32 log_softmax loses about 1e-5 per token over 50,000 words on a CPU.

    Sums of a dozen tokens then differ by more than 1e-4. Compared with double precision, ours do
    not, and neither do lm_eval's with a softmax in double precision.
    """
    torch.manual_seed(0)
    logits = 3 * torch.randn(12, 49152)
    tokens = torch.arange(12)
    exact = logits.double().log_softmax(-1)[tokens, tokens].sum().item()
    ours = gather_logprobs(logits, tokens, 0).logprob.double().sum().item()
    assert abs(ours - exact) < 2e-5


def test_chat_templates_are_applied_alike(small, tasks):
    folder, names = tasks
    assert assert_equal(*both(small, folder, names[:2], 6, chat=True)) == 5 * 6


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def test_a_system_message_the_template_refuses_is_left_out_and_said_once(tasks, tmp_path, caplog):
    tokenizer = small_tokenizer()
    pair = random_model(tokenizer), tokenizer
    tokenizer.chat_template = NO_SYSTEM + CHAT
    data = lm_tasks.DATA.format(path=tasks[0] / "data.jsonl")
    (tmp_path / "w.yaml").write_text(lm_tasks.WRITE + "description: Say what they saw.\n" + data)
    assert assert_equal(*both(pair, tmp_path, ["tiny_write"], 3, chat=True)) == 3
    messages = [
        r.getMessage() for r in caplog.records if r.name == "nopad.inference.harness.engine_lm"
    ]
    assert messages == ["the chat template refuses system messages; omitting them: no system"]
    tokenizer.chat_template = "{{ raise_exception('nothing works') }}"
    with pytest.raises(Exception, match="nothing works"):
        EngineLM(*pair).apply_chat_template([{"role": "user", "content": "a"}])


@pytest.fixture
def generation_config(small):
    """A copy of the model's generation_config; the original is restored afterwards."""
    model, before = small[0], small[0].generation_config
    model.generation_config = copy.deepcopy(before)
    yield model.generation_config
    model.generation_config = before


@pytest.mark.parametrize(
    ("name", "value"), [("repetition_penalty", 1.3), ("max_new_tokens", 5), ("max_new_tokens", 40)]
)
def test_settings_of_the_model_change_answers_alike(small, generation_config, tasks, name, value):
    setattr(generation_config, name, value)
    assert assert_equal(*both(small, tasks[0], ["tiny_write"], 4)) == 4


def test_settings_of_the_model_that_the_engine_does_not_do_are_refused(
    small, generation_config, tasks
):
    generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match="sets no_repeat_ngram_size to 2, which the engine"):
        Harness(*small, ["tiny_write"], limit=2, include_path=str(tasks[0]))
    assert Harness(*small, ["tiny_roll"], limit=2, include_path=str(tasks[0]))(), (
        "no task generates"
    )


def test_grade_school_questions_with_examples_are_answered_alike(stories, shared, tmp_path):
    data = shared / "data" / "gsm8k"
    (tmp_path / "gsm.yaml").write_text(
        f"""task: gsm_local
dataset_path: json
dataset_kwargs: {{data_files: {{train: {data}/train.jsonl, test: {data}/test.jsonl}}}}
output_type: generate_until
test_split: test
fewshot_split: train
num_fewshot: 2
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Question:", "</s>"], max_gen_toks: 40, do_sample: false}}
filter_list:
  - name: strict
    filter:
      - {{function: regex, regex_pattern: "#### (-?[0-9.,]+)"}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
    )
    # Contexts exceed the model's 512 positions: both truncate them from the left.
    assert assert_equal(*both(stories, tmp_path, ["gsm_local"], 6)) == 6


def test_an_evaluation_sets_no_seed_writes_no_cache_and_leaves_the_model(small, tasks):
    from lm_eval.caching import cache

    folder, names = tasks
    model, tokenizer = small
    model.train()
    harness = Harness(model, tokenizer, names, limit=3, include_path=str(folder))
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    cached = sorted(Path(cache.PATH).glob("*")) if Path(cache.PATH).exists() else []

    def states():
        flags = [m.training for m in model.modules()]
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), flags

    before = states()
    first, second = harness(), harness()
    after = states()
    model.eval()
    assert before[:2] == after[:2] and before[3] == after[3] and torch.equal(before[2], after[2])
    assert first == second and set(first) >= {"tiny_choice/acc", "tiny_roll/bits_per_byte"}
    assert (sorted(Path(cache.PATH).glob("*")) if Path(cache.PATH).exists() else []) == cached


def test_an_evaluation_in_training_shows_no_bars(small, tasks, capsys):
    folder, names = tasks
    harness = Harness(*small, names[:2], include_path=str(folder), limit=2, memory=1 << 24)
    capsys.readouterr()
    assert harness()
    assert "it/s" not in capsys.readouterr().err
    assert harness.results() and "it/s" in capsys.readouterr().err, "they are back"


def test_standard_errors_are_drawn_in_this_process_and_told_to_nobody(
    small, tmp_path, monkeypatch, capsys
):
    """A forked process would inherit the trainer's threads, device and signal handlers."""
    lm_tasks.write_tasks(tmp_path, 6)
    (tmp_path / "last.yaml").write_text(LAST + lm_tasks.DATA.format(path=tmp_path / "data.jsonl"))
    ours, theirs = both(small, tmp_path, ["tiny_last"], 6)
    assert theirs["results"]["tiny_last"]["perplexity_stderr,none"] > 0
    assert assert_equal(ours, theirs) == 6

    monkeypatch.setattr("multiprocessing.Pool", lambda *_: pytest.fail("processes were forked"))
    monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
    harness = Harness(*small, ["tiny_last"], limit=6, include_path=str(tmp_path))
    capsys.readouterr()
    metrics = harness.results()["results"]["tiny_last"]
    assert metrics["perplexity_stderr,none"] > 0 and metrics["acc_stderr,none"] >= 0
    assert set(harness()) == {"tiny_last/acc", "tiny_last/perplexity"}, "what a training logs"
    assert capsys.readouterr().out == "" and "DISABLE_MULTIPROC" not in os.environ


def test_lm_evals_own_entry_takes_the_engine_and_none_for_seeds(small, tasks):
    folder, names = tasks
    state = torch.get_rng_state()
    results = lm_eval.simple_evaluate(
        model=EngineLM(*small),
        tasks=names[:1],
        limit=4,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        random_seed=None,
        numpy_random_seed=None,
        torch_random_seed=None,
        bootstrap_iters=0,
    )
    assert results["results"]["tiny_choice"]["sample_len"] == 4
    assert torch.equal(state, torch.get_rng_state())


class Request:
    """A request as lm_eval makes them."""

    def __init__(self, *args):
        self.args = args


def test_a_special_token_among_the_stop_strings_ends_the_text(small):
    lm = EngineLM(*small)
    ids, params, _ = lm.generation_request("Lily", {"until": ["<end>", "."], "max_gen_toks": 4})
    checked = lm.engine._tokenizer.check_params(params)
    assert checked.stop == (".",) and set(checked.stop_token_ids) == {1, 2}
    assert params.is_greedy and params.max_tokens == 4 and ids == lm.tok_encode("Lily")


STOPS = ([" "], [" a"], [" saw", " in"], ["the"], [""], ["", " "], ["."], [" the", "aw a"])


@pytest.mark.parametrize("add_bos_token", [None, False])
def test_answers_equal_hf_where_the_first_space_of_a_text_is_dropped(add_bos_token):
    tokenizer = metaspace_tokenizer()
    model, settings = random_model(tokenizer), {"max_gen_toks": 12, "do_sample": False}
    options = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    requests = [
        Request(row["question"], {"until": list(until), **settings})
        for row in lm_tasks.documents(3)
        for until in STOPS
    ]
    hf = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu", **options)
    want = hf.generate_until(copy.deepcopy(requests), disable_tqdm=True)
    assert EngineLM(model, tokenizer, **options).generate_until(requests) == want
    assert any(" " in text for text in want) and len(set(want)) > 4


NAMED_STOPS = (["s>"], ["saw<s>"], ["<s> the", "in<"], ["<s><s>"], ["<s>"], [" a"])


def test_answers_equal_hf_where_a_stop_string_names_special_tokens():
    tokenizer = metaspace_tokenizer()
    model, settings = random_model(tokenizer), {"max_gen_toks": 12, "do_sample": False}
    with torch.no_grad():
        model.lm_head.weight[0] *= 2.5  # it writes many <s>
    rows = lm_tasks.documents(8)
    requests = [
        Request(row["question"], {"until": list(until), **settings})
        for row in rows
        for until in NAMED_STOPS
    ]
    hf = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")
    want = hf.generate_until(copy.deepcopy(requests), disable_tqdm=True)
    assert EngineLM(model, tokenizer).generate_until(requests) == want
    for first in range(4):
        ends = {len(text) for text in want[first :: len(NAMED_STOPS)]}
        assert len(ends) > 2, NAMED_STOPS[first]


def test_a_setting_we_do_not_have_is_refused_by_name(small):
    lm = EngineLM(*small)
    with pytest.raises(ValueError, match="num_beams is 4: beam search is not supported"):
        lm.generate_until([Request("Lily", {"num_beams": 4})])
    with pytest.raises(ValueError, match="'length_penalty' is not supported"):
        lm.generate_until([Request("Lily", {"length_penalty": 2})])
    plain = {"max_gen_toks": 4}
    one, none = (
        lm.generate_until([Request("Lily", s)]) for s in ({**plain, "num_beams": 1}, plain)
    )
    assert one == none


@pytest.mark.parametrize(("bos", "works"), [("<s>", True), (None, False)])
def test_a_tokenizer_needs_a_token_to_begin_with(small, bos, works):
    model, tokenizer = small[0], small_tokenizer()
    tokenizer.eos_token, tokenizer.bos_token = None, bos
    if not works:
        with pytest.raises(ValueError, match="neither a bos nor an eos token"):
            EngineLM(model, tokenizer)
        return
    lm = EngineLM(model, tokenizer)
    assert len(lm.generate_until([Request("Lily", {"max_gen_toks": 4})])) == 1
    assert len(lm.loglikelihood([Request("", " a cat")], disable_tqdm=True)) == 1


def test_equal_requests_are_computed_once_and_answered_each(small):
    lm = EngineLM(*small)
    requests = [
        Request("Lily saw", " a cat"),
        Request("Lily saw", " a dog"),
        Request("Tom", " a cat"),
    ]
    once = lm.loglikelihood(requests, disable_tqdm=True)
    ran = lm.engine.stats.num_computed_tokens
    again = lm.loglikelihood(requests * 5, disable_tqdm=True)
    assert [round(x, 5) for x, _ in again] == [round(x, 5) for x, _ in once] * 5
    assert lm.engine.stats.num_computed_tokens - ran <= ran


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"tasks": "tiny_choice"}, "tasks is 'tiny_choice'; pass a list"),
        ({"tasks": []}, "tasks is .*at least one"),
        ({"limit": "5"}, "limit is '5'"),
        ({"limit": 1.5}, "a fraction below 1"),
        ({"num_fewshot": -1}, "num_fewshot is -1"),
    ],
)
def test_what_is_no_choice_of_tasks_or_documents_is_refused(small, tasks, wrong, word):
    with pytest.raises(ValueError, match=word):
        Harness(*small, **{"tasks": ["tiny_choice"], "include_path": str(tasks[0]), **wrong})


def test_a_system_instruction_and_settings_of_ones_own_reach_the_prompts(small, tasks):
    settings = {"system_instruction": "Look.", "gen_kwargs": {"max_gen_toks": 2}}
    harness = Harness(*small, ["tiny_write"], limit=2, include_path=str(tasks[0]), **settings)
    for sample in harness.results(samples=True)["samples"]["tiny_write"]:
        prompt, gen_kwargs = sample["arguments"][0]
        assert prompt.startswith("Look.") and gen_kwargs["max_gen_toks"] == 2
        assert gen_kwargs["until"] == [".", "\n\n"], "the others stay"


def test_too_little_time_raises_instead_of_scoring_a_part(small, tasks):
    folder, names = tasks
    harness = Harness(*small, names[:1], limit=4, include_path=str(folder))
    with pytest.raises(TimeoutError, match="lower the limit"):
        harness(deadline=0)
    assert harness()["tiny_choice/acc"] >= 0, "the next call has a new deadline"


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_ranks(tmp_path):
    from tiny_run import launch

    child = Path(__file__).parents[1] / "support" / "harness_child.py"
    (alone,) = launch(child, tmp_path, world=1, timeout=300)
    for metrics in launch(child, tmp_path, world=2, timeout=300):
        assert metrics == alone
