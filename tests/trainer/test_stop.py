"""Stopping when asked: a signal is heard once, agreed, and given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from nopad.trainer.stop import SIGNALS, StopRequest

IMPATIENT = """
import os, signal, sys, time
from nopad.trainer.stop import StopRequest
request = StopRequest()
print("listening", flush=True)
while not request.agreed():
    time.sleep(0.01)
print("asked", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_heard_and_the_handlers_are_given_back(number):
    before = signal.getsignal(number)
    request = StopRequest()
    assert not request.agreed()
    os.kill(os.getpid(), number)
    assert request.agreed() and request.asked == number
    request.release()
    assert signal.getsignal(number) == before


def test_a_second_signal_leaves_at_once():
    child = subprocess.Popen([sys.executable, "-c", IMPATIENT], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "listening\n"
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "asked\n"
    began = time.monotonic()
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=30) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 10
