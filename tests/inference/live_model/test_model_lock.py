"""The lock of a model: re-entrant, and handed over in the order in which threads came."""

from __future__ import annotations

import time
from threading import Thread

import pytest
from nopad.inference.live_model.model_lock import ModelLock


def waiting(lock: ModelLock, count: int) -> None:
    while len(lock._queue) < count:
        time.sleep(0.001)


def test_threads_get_it_in_the_order_in_which_they_came():
    lock, order, threads = ModelLock(), [], []

    def take(name: int) -> None:
        with lock:
            order.append(name)

    with lock:
        for name in range(5):
            threads.append(Thread(target=take, args=(name,), daemon=True))
            threads[-1].start()
            waiting(lock, name + 1)
    lock.acquire()  # a thread that takes it again at once is behind those that wait
    order.append("again")
    lock.release()
    for thread in threads:
        thread.join(30)
    assert order == [0, 1, 2, 3, 4, "again"] and not lock.has_waiters


def test_a_thread_may_take_it_again_and_others_wait_for_the_last_release():
    lock, taken = ModelLock(), []
    with lock, lock:
        assert lock.depth == 2
        thread = Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join(30)
    assert taken == [False] and lock.depth == 0


def test_a_thread_that_is_interrupted_while_it_waits_leaves_the_queue():
    lock, other = ModelLock(), ModelLock()

    class Interrupted:
        def acquire(self):
            raise KeyboardInterrupt

    with lock:
        assert not lock.has_waiters
        lock._queue.append((1, turn := Interrupted()))
        lock._cancel(1, turn)
        assert not lock.has_waiters
    with pytest.raises(AssertionError, match="not this thread's"):
        other.release()
