"""The trace has the events of each request, in order and as spans."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from nopad.inference import Engine
from nopad.inference.metrics.request_trace import RequestTrace
from nopad.inference.requests.request import Request
from nopad.inference.requests.sampling_params import SamplingParams

LIFE = ["queued", "admitted", "prefilled", "finished"]


def lives(trace: RequestTrace) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for _, request, what, _ in trace.events:
        found.setdefault(request, []).append(what)
    return found


def test_a_request_is_prefilled_once_between_admission_and_its_end(tiny, tmp_path):
    engine = Engine(tiny("llama"), max_num_batched_tokens=4)
    params = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    engine.generate([list(range(3, 40)), [3, 4]], params)
    assert list(lives(engine.trace).values()) == [LIFE] * 2
    engine.trace.write_chrome(tmp_path / "trace.json")
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows: dict[int, list[str]] = {}
    for span in spans:
        rows.setdefault(span["tid"], []).append(span["name"])
    assert list(rows.values()) == [["waiting", "prefill", "decode", "finished: length"]] * 2


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_computed_again_is_prefilled_again(world, lookahead):
    trace = RequestTrace()
    w = world(num_pages=4, page_size=16, max_num_seqs=3, lookahead=lookahead, trace=trace)
    params = SamplingParams(temperature=0, max_tokens=48)
    for number in range(3):
        w.scheduler.add(Request(number, np.arange(16 + number), 60, params))
    w.drain(200)
    sent_back = 0
    for life in lives(trace).values():
        assert life[:2] == LIFE[:2] and life[-1] == "finished"
        running = [what for what in life if what != "queued"]
        for before, after in pairwise(running):
            if after == "prefilled":
                assert before in ("admitted", "resumed")
            sent_back += after == "preempted"
        assert life.count("prefilled") >= 1
    assert sent_back > 0, "the cache was to be too small for all"
