"""Requests between optimizer steps: training is bitwise the same, and their time is limited."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tiny_run
import torch
import untouched
from fake_tokenizer import FakeTokenizer
from nopad.inference import Engine
from nopad.inference.endpoint import serve
from nopad.runtime import load_draw_counts
from nopad.trainer.evaluation import live_requests

STEPS = 6
CHILD = Path(__file__).parents[1] / "support" / "live_requests_child.py"


class Served:
    """A server whose training waits for a request at each step, and two clients that send them."""

    def __init__(self, **settings):
        self.settings = {"when": "step", "max_share": 1.0, **settings}
        self.answers: list[httpx.Response] = []

    def __call__(self, live):
        tokenizer = FakeTokenizer(eos_token_id=0)
        self.server = serve(Engine(live, tokenizer), port=0, token="t", **self.settings)
        is_due = self.server.is_due

        def is_due_soon(last: bool = False) -> bool:
            end = time.monotonic() + 20
            while not last and not is_due() and time.monotonic() < end:
                time.sleep(0.001)
            return is_due(last)

        self.server.is_due = is_due_soon
        self.pool = ThreadPoolExecutor(2)
        self.clients = [self.pool.submit(self._ask, k) for k in range(2)]
        return self.server

    def _ask(self, number: int) -> None:
        headers = {"Authorization": "Bearer t"}
        body = {"prompt": [3 + number, 4], "max_tokens": 3, "temperature": 1, "ignore_eos": True}
        with httpx.Client(base_url=self.server.url, headers=headers, timeout=30) as http:
            while True:
                try:
                    self.answers.append(http.post("/completions", json=body))
                except httpx.TransportError:
                    return
                if self.answers[-1].status_code != 200:
                    return

    def finish(self) -> list[httpx.Response]:
        for each in self.clients:
            each.result(30)
        self.pool.shutdown()
        return self.answers


def train(trainer: str, served: Served | None, folder):
    torch.set_num_threads(1)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    load_draw_counts({})
    diary = untouched.Diary("sampled", "ends", 3)
    diary.serve = served
    return diary, untouched.TRAINERS[trainer](diary, STEPS, folder)


@pytest.mark.parametrize("trainer", untouched.TRAINERS)
def test_training_with_live_requests_is_bitwise_training_without(trainer, tmp_path):
    plain, expected = train(trainer, None, tmp_path / "plain")
    served = Served()
    diary, final = train(trainer, served, tmp_path / "served")
    answers = served.finish()
    assert {key for key in expected if final[key] != expected[key]} == set()
    for note, other in zip(diary.notes, plain.notes, strict=True):
        assert {key for key in other if note[key] != other[key]} == set()
    # Sampled evaluations draw the same numbers as without requests.
    assert [r.rows for r in diary.reports] == [r.rows for r in plain.reports]
    done = [answer.json() for answer in answers if answer.status_code == 200]
    assert {answer["training_step"] for answer in done} == {*range(1, STEPS + 1)}
    assert {answer.status_code for answer in answers} <= {200, 503}


@pytest.mark.parametrize(
    ("trainer", "when"),
    [
        *((trainer, "step") for trainer in untouched.TRAINERS),
        ("hf", "evaluation"),
        pytest.param("accelerate", "evaluation", marks=pytest.mark.slow),
        pytest.param("lightning", "evaluation", marks=pytest.mark.slow),
    ],
)
def test_the_server_names_the_training_step_without_any_request(trainer, when, tmp_path):
    seen: list[int | None] = []

    def watched(live):
        server = serve(Engine(live, FakeTokenizer()), port=0, token="t", when=when)
        http = httpx.Client(base_url=server.url, headers={"Authorization": "Bearer t"})

        def look(*_) -> None:
            step = http.get("../health").json()["training_step"]
            assert http.get("models").json()["data"][0]["training_step"] == step
            gauge = [] if step is None else [f"nopad_training_step {step}"]
            lines = http.get("../metrics").text.splitlines()
            assert [line for line in lines if line.startswith("nopad_training_step ")] == gauge
            seen.append(step)

        live.register_forward_pre_hook(look)
        return server

    train(trainer, watched, tmp_path)
    steps = [step for step in dict.fromkeys(seen) if step is not None]
    assert steps == [*range(trainer == "accelerate", STEPS)], "a loop of one's own has no step 0"


def test_requests_wait_for_an_evaluation_if_the_server_says_so(tmp_path):
    from nopad.trainer.with_hf import ServeCallback

    served = Served(when="evaluation")
    server = served(untouched.model())
    while server._queue.num_waiting < 2:
        time.sleep(0.001)
    callback, steps = ServeCallback.__new__(ServeCallback), []
    callback.server, callback._answer = server, lambda step, last=False: steps.append((step, last))
    state = type("State", (), {"global_step": 4})
    args = type("Args", (), {"load_best_model_at_end": False})
    callback.on_step_end(args, state, None)
    assert steps == []
    callback.on_evaluate(args, state, None)
    assert steps == [(4, False)]
    callback.on_train_end(args, state, None)
    assert steps == [(4, False), (4, True)]
    assert {answer.status_code for answer in served.finish()} == {503}, "refused, not lost"


def test_a_server_that_does_not_wait_for_the_training_is_refused():
    server = type("Server", (), {"when": None})
    with pytest.raises(ValueError, match="when='step'"):
        live_requests.check_server(server)


def test_on_several_ranks_the_first_one_answers_and_no_layout_is_disturbed():
    first, second = tiny_run.launch(CHILD, world=2)
    assert [*first] == ["ddp", "fsdp", "fsdp that does not fit"]
    for layout, seen in first.items():
        assert seen["same"] and second[layout]["same"], layout
        assert {*seen["steps"]} == {1, 2, 3, 4} and second[layout]["steps"] == [], layout
        assert seen["idle"] < 0.05, layout
