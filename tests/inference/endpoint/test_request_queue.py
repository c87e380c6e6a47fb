"""The time that requests may take of a training, and what is refused instead."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from nopad.inference.endpoint import request_queue
from nopad.inference.endpoint.request_queue import TimeShare
from nopad.trainer.evaluation.live_requests import answer_requests
from served import complete, running, until


class Clock:
    """A clock that only requests and a fake training advance."""

    def __init__(self):
        self.now = 500.0

    def __call__(self) -> float:
        return self.now


def spend(share: TimeShare, clock: Clock, seconds: float) -> None:
    with share.pause():
        clock.now += seconds


def test_time_is_saved_before_it_is_spent():
    share = TimeShare(0.1, 10, clock=(clock := Clock()))
    share.start()
    assert share.wait(3.0) == pytest.approx(30), "nothing is saved yet"
    clock.now += 30
    assert share.wait(3.0) == pytest.approx(0) and share.wait(4.0) == pytest.approx(10)
    spend(share, clock, 3.0)
    assert share.seconds == 3 and share.saved() == pytest.approx(0.3), "a pause is time as well"


def test_time_beyond_the_share_is_charged_to_later_windows():
    share = TimeShare(0.1, 10, clock=(clock := Clock()))
    share.start()
    clock.now += 10
    spend(share, clock, 3.0)
    assert share.saved() == pytest.approx(1 - 3 + 0.3)
    assert share.wait(0) == pytest.approx(17), "3 s are 10 % of 30 s, and 13 s are over"
    with share.pause():
        clock.now += 0.5
        assert share.saved() == pytest.approx(-1.7 - 0.5 + 0.05), "while they are spent"


def test_a_quiet_hour_does_not_allow_an_hour_of_requests():
    share = TimeShare(0.1, 10, clock=(clock := Clock()))
    share.start()
    clock.now += 3600
    assert share.saved() == 10
    spend(share, clock, 10.0)
    assert share.wait(10.0) == pytest.approx(100)


@pytest.mark.parametrize(("error", "excess"), [(0.0, 0.0), (0.3, 0.3)])
def test_requests_take_at_most_their_share_of_the_time(error, excess):
    """A thousand windows under constant load, each up to `error` longer than expected."""
    share, rng = TimeShare(0.2, 10, clock=(clock := Clock())), random.Random(0)
    for number in range(20_000):
        share.start()
        expected = rng.uniform(0.1, 2)
        if share.wait(expected) == 0:
            spend(share, clock, expected * (1 + rng.uniform(-error, error)))
            spent = clock.now - 500
            assert share.seconds <= 0.2 * spent + 2 * excess + 1e-6, number
        clock.now += rng.uniform(0.01, 0.2)
    assert share.seconds / (clock.now - 500) >= 0.199, "the share can be used"


@pytest.fixture(scope="module")
def measured():
    """A server beside a training that never steps, after one request of known speed."""
    with running(when="step", max_share=1.0, max_pause=5.0) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(complete, server)
        until(lambda: server._queue.num_waiting == 1)
        server.run_requests(1)
        assert first.result().status_code == 200
        yield server


@pytest.fixture
def paused(measured, monkeypatch):
    """The same server, on a machine that keeps its speed."""
    monkeypatch.setattr(measured._queue, "_slack", 1.0)
    return measured


def test_the_time_of_a_step_is_known_before_requests_are_admitted():
    """At an unknown time, all of the first burst would run on what one request has saved."""
    limits = {"when": "step", "max_share": 0.1, "max_pause": 30}
    with running(**limits) as server, ThreadPoolExecutor() as pool:
        queue, step = server._queue, server._engine.step

        def slowly():
            time.sleep(0.02)
            return step()

        server._engine.step = slowly
        burst = [pool.submit(complete, server, max_tokens=50, ignore_eos=True) for _ in range(4)]
        until(lambda: queue.num_waiting == 4)
        queue.time_share.start()
        server.run_requests(1)
        assert queue.num_waiting == 4, "50 steps of 20 ms take more than what is saved"
        assert 0.02 <= queue.step_seconds < 1 and not server.is_due()
        server.run_requests(1, last=True)
        assert [call.result().status_code for call in burst] == [200] * 4


def test_a_request_that_would_stop_the_training_for_long_is_refused(paused, monkeypatch):
    monkeypatch.setattr(paused._queue, "step_seconds", 0.1)
    refused = complete(paused, max_tokens=60)
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
    assert "about 6.1 s, and max_pause is 5" in refused.json()["error"]["message"]
    with ThreadPoolExecutor() as pool:
        short = pool.submit(complete, paused, max_tokens=40)
        until(lambda: paused._queue.num_waiting == 1)
        paused.run_requests(2)
        assert short.result().json()["training_step"] == 2


def test_windows_that_took_too_long_make_later_requests_seem_longer(paused, monkeypatch):
    queue = paused._queue
    monkeypatch.setattr(request_queue, "_MIN_STEPS", 10**9)  # the time of a step stays as set
    monkeypatch.setattr(queue, "_slack", 1.0)
    with ThreadPoolExecutor() as pool:
        for step_seconds, slack in ((1e-9, 2.0), (0.2, 1.9), (0.2, 1.81)):
            monkeypatch.setattr(queue, "step_seconds", step_seconds)
            call = pool.submit(complete, paused)
            until(lambda: queue.num_waiting == 1)
            paused.run_requests(1)
            assert call.result().status_code == 200
            assert queue._slack == pytest.approx(slack)


def test_a_slow_first_step_does_not_refuse_later_requests():
    """The first step compiles and allocates: a mean with it would make every request seem long."""
    limits = {"when": "step", "max_share": 1.0, "max_pause": 30}
    with running(**limits) as server, ThreadPoolExecutor() as pool:
        step, sleeps = server._engine.step, [0.5]

        def slow_at_first():
            time.sleep(sleeps.pop() if sleeps else 0)
            return step()

        server._engine.step = slow_at_first
        for max_tokens in (1, 100, 100):
            call = pool.submit(complete, server, max_tokens=max_tokens, ignore_eos=True)
            until(lambda: server._queue.num_waiting == 1 or call.done())  # noqa: B023
            server.run_requests(1)
            assert call.result().status_code == 200


def test_a_used_up_share_refuses_requests_that_would_wait_too_long(paused, monkeypatch):
    share = TimeShare(0.001, 10)
    monkeypatch.setattr(paused._queue, "time_share", share)
    monkeypatch.setattr(paused._queue, "step_seconds", 0.0)
    share.start()
    with share.pause():
        time.sleep(0.2)
    assert not paused.is_due()
    refused = complete(paused)
    assert refused.status_code == 503 and 100 < int(refused.headers["Retry-After"]) <= 400


def test_a_request_waits_until_its_time_is_saved(paused, monkeypatch):
    """Shorter ones that come later do not overtake it."""
    share = TimeShare(0.1, 10, clock=(clock := Clock()))
    monkeypatch.setattr(paused._queue, "time_share", share)
    monkeypatch.setattr(paused._queue, "step_seconds", 0.1)
    share.start()
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(complete, paused, max_tokens=19)]
        until(lambda: paused._queue.num_waiting == 1)
        calls.append(pool.submit(complete, paused, max_tokens=4))
        until(lambda: paused._queue.num_waiting == 2)
        clock.now += 19
        assert not paused.is_due(), "1.9 s are saved, enough for the second"
        clock.now += 1.01
        assert paused.is_due()
        with paused.pause():
            paused.run_requests(5)
        assert [call.result().json()["training_step"] for call in calls] == [5, 5]


def test_all_of_a_pause_is_charged(paused):
    """Also what a trainer does around the requests, such as gathering a sharded model."""
    before, model = paused._queue.time_share.seconds, paused._engine._model
    with ThreadPoolExecutor() as pool:
        call = pool.submit(complete, paused)
        until(lambda: paused._queue.num_waiting == 1)
        run = paused.run_requests

        def slowly(step, last):
            time.sleep(0.3)
            run(step, last)

        paused.run_requests = slowly
        try:
            answer_requests(paused, 6, model)
        finally:
            del paused.run_requests
        assert call.result().status_code == 200
    assert paused._queue.time_share.seconds - before >= 0.3


def test_requests_that_arrive_in_a_window_join_it_while_time_is_left(paused):
    queue, late = paused._queue, []
    step = paused._engine.step
    with ThreadPoolExecutor() as pool:

        def step_and_send():
            events = step()
            if not late:
                late.append(pool.submit(complete, paused, [50, 51]))
                until(lambda: queue.num_waiting == 1)
            return events

        paused._engine.step = step_and_send
        try:
            first = pool.submit(complete, paused, [40, 41], max_tokens=20, ignore_eos=True)
            until(lambda: queue.num_waiting == 1)
            paused.run_requests(3)
        finally:
            del paused._engine.step
        assert first.result().json()["training_step"] == 3
        assert late[0].result().json()["training_step"] == 3
