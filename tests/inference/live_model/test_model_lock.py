"""The lock of a model: re-entrant, and handed over in the order in which threads came."""

from __future__ import annotations

import time
from threading import Lock, Thread

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
        thread.join(120)
    assert order == [0, 1, 2, 3, 4, "again"] and not lock.has_waiters


def test_a_thread_may_take_it_again_and_others_wait_for_the_last_release():
    lock, taken = ModelLock(), []
    with lock, lock:
        assert lock.depth == 2
        thread = Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join(120)
    assert taken == [False] and lock.depth == 0


class InterruptedLock:
    """A lock on which Ctrl-C ends the wait, before or after the lock was released."""

    def __init__(self, is_released: bool):
        self._lock, self._is_released, self._is_taken = Lock(), is_released, False
        self.release = self._lock.release

    def acquire(self) -> None:
        if not self._is_taken or self._is_released:
            self._lock.acquire()
        if self._is_taken:
            raise KeyboardInterrupt
        self._is_taken = True


@pytest.mark.parametrize("is_released", [False, True])
def test_a_thread_that_is_interrupted_while_it_waits_keeps_nobody_out(monkeypatch, is_released):
    lock, told = ModelLock(), []
    name = "nopad.inference.live_model.model_lock.Lock"
    monkeypatch.setattr(name, lambda: InterruptedLock(is_released))

    def wait() -> None:
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
        told.append("interrupted")

    with lock:
        thread = Thread(target=wait, daemon=True)
        thread.start()
        if is_released:
            waiting(lock, 1)
        else:
            thread.join(120)
            assert told and not lock.has_waiters
    thread.join(120)
    assert told and not lock.has_waiters and lock.depth == 0
    assert lock.acquire(blocking=False), "the thread that was interrupted has it"


def test_only_the_thread_that_holds_it_can_release_it():
    with pytest.raises(AssertionError, match="not this thread's"):
        ModelLock().release()
