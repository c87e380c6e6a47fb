"""The time that requests may take of a training, and what is refused instead."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from nopad.inference.endpoint.request_queue import TimeShare
from served import complete, running, until


def test_time_beyond_the_share_is_charged_to_later_windows():
    now = [100.0]
    share = TimeShare(0.1, 10, clock=lambda: now[0])
    now[0] = 500.0
    share.start()
    assert share.wait() == 0, "nothing was used yet"
    share.seconds, now[0] = 3.0, 503.0
    assert share.wait() == pytest.approx(27), "3 s are 10 % of 30 s"
    now[0] = 530.0
    assert share.wait() == 0 and share.wait(running=0.5) == pytest.approx(5)


def test_requests_take_at_most_their_share_of_the_time():
    """Ten windows per second of a clock that only requests and a fake training advance."""
    now = [0.0]
    share = TimeShare(0.2, 10, clock=lambda: now[0])
    for _ in range(1000):
        share.start()
        if share.wait() == 0:
            share.seconds += 0.37
            now[0] += 0.37
        now[0] += 0.1
    assert share.seconds / now[0] <= 0.2 + 0.37 / now[0]
    assert share.seconds / now[0] >= 0.19, "the share can be used"


@pytest.fixture(scope="module")
def paused():
    """A server beside a training that never steps, after one request of known speed."""
    with running(when="step", max_share=1.0, max_pause=5.0) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(complete, server)
        until(lambda: server._queue.num_waiting == 1)
        server.run_requests(1)
        assert first.result().status_code == 200
        yield server


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
    share = paused._queue.time_share
    share.start()
    monkeypatch.setattr(share, "max_share", 0.001)
    monkeypatch.setattr(share, "seconds", 0.2)
    assert not paused.is_due()
    refused = complete(paused)
    assert refused.status_code == 503 and 100 < int(refused.headers["Retry-After"]) <= 200


def test_requests_that_arrive_in_a_window_join_it_while_time_is_left(paused):
    queue, late = paused._queue, []
    queue.time_share.seconds = 0.0
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
