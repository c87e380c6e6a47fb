"""A signal is received once, stops all ranks, and the handlers are restored."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
import warm_python
from nopad.trainer import graceful_stop
from nopad.trainer.graceful_stop import RELAY_SECONDS, STOP_SIGNALS, StopRequest

BEGINNING = """
import ctypes, os, signal, time
from nopad.trainer import graceful_stop as stop
from nopad.trainer.graceful_stop import RELAY_SECONDS, StopRequest
request = StopRequest()
print("listening", flush=True)
"""
IMPATIENT = f"""{BEGINNING}
while not request.should_stop():
    time.sleep(0.01)
print("asked", flush=True)
time.sleep(600)
"""
PATIENT = IMPATIENT.replace("request =", "stop.RELAY_SECONDS = 600\nrequest =")
DEAF = f"""{BEGINNING}
lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
libc.pthread_mutex_lock(lock)  # for ever, in C
"""
PARENT = f"""{BEGINNING}
child = os.fork()
if not child:
    time.sleep(600)
    os._exit(1)
time.sleep(RELAY_SECONDS)
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    os.kill(child, number)
    time.sleep(0.1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), request.received, flush=True)
"""


@pytest.fixture
def child():
    started = []

    def start(code: str) -> warm_python.Popen:
        process = warm_python.Popen(["-c", code], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == "listening\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_heard_and_the_handlers_are_given_back(number):
    before, descriptor = signal.getsignal(number), signal.set_wakeup_fd(-1)
    request = StopRequest()
    assert not request.should_stop()
    os.kill(os.getpid(), number)
    assert request.should_stop() and request.received == number
    request.release()
    assert signal.getsignal(number) == before
    assert signal.set_wakeup_fd(descriptor) == -1


def test_what_was_asked_is_forgotten_when_the_signals_are_given_back():
    request = StopRequest()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.should_stop()
        request._pending = torch.ones(())  # as on an accelerator
        request.release()
        assert not request.should_stop() and request._pending is None
        request.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.should_stop()
    finally:
        request.release()


def test_a_signal_to_an_outer_request_is_heard_by_the_inner_one():
    outer = StopRequest()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        inner = StopRequest()
        assert inner.should_stop() and inner.received == signal.SIGUSR1
        inner.release()
        assert outer.should_stop(), "the inner request took it away"
    finally:
        outer.release()


def test_a_signal_is_heard_though_nobody_reads_what_is_said(monkeypatch):
    def write(descriptor, text):
        raise BrokenPipeError

    monkeypatch.setattr(graceful_stop, "os", SimpleNamespace(**{**vars(os), "write": write}))
    request = StopRequest()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.should_stop()
    finally:
        request.release()


def test_a_second_signal_leaves_at_once(child):
    process = child(IMPATIENT)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    time.sleep(2 * RELAY_SECONDS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 128 + signal.SIGTERM


def test_what_a_launcher_passes_on_is_no_second_signal(child):
    process = child(PATIENT)
    process.send_signal(signal.SIGINT)  # from the terminal
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)  # and from the launcher
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)


def test_a_second_signal_is_heard_inside_a_call_that_never_returns(child):
    process = child(DEAF)
    for _ in range(2):
        time.sleep(4 * RELAY_SECONDS)  # a loaded machine hears the first one late
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 128 + signal.SIGTERM


def test_signals_to_a_fork_are_not_the_parents_and_sigterm_ends_it(child):
    """A pool ends its processes by SIGTERM, and waits for them."""
    process = child(PARENT)
    assert process.stdout.readline() == f"{-signal.SIGTERM} None\n"
    assert process.wait(timeout=120) == 0
