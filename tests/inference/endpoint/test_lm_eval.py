"""lm_eval through the live endpoint, in the middle of a training, scores as in this process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import lm_tasks
import pytest
import torch
import warm_python
from nopad.inference.harness import Harness
from served import TOKEN, train_beside
from small_checkpoint import small_tokenizer

CLIENT = Path(__file__).parents[1] / "support" / "lm_eval_client.py"


@pytest.mark.slow
def test_lm_eval_through_the_endpoint_scores_as_in_this_process(tmp_path):
    tokenizer, found = small_tokenizer(), {}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    lm_tasks.write_tasks(tmp_path, 12)
    paths = [str(tmp_path / "tokenizer"), str(tmp_path)]

    def client(server) -> None:
        ran = warm_python.run(
            [CLIENT, server.url, TOKEN, *paths], env=dict(os.environ), timeout=300
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        found.update(json.loads(ran.stdout.splitlines()[-1]))

    patient = {"max_share": 1.0, "max_pause": 600, "timeout": 600}
    model, state, steps = train_beside(tokenizer, client=client, num_updates=3, **patient)
    assert steps > 3, "lm_eval asks in the middle of the training"
    _, without, _ = train_beside(tokenizer, steps, num_updates=3)
    assert all(torch.equal(a, b) for a, b in zip(state, without, strict=True))
    for name, task, chat in (
        ("tiny_choice", "tiny_choice", False),
        ("tiny_write", "tiny_write", False),
        ("chat", "tiny_write", True),
    ):
        harness = Harness(model, tokenizer, [task], limit=12, chat=chat, include_path=str(tmp_path))
        ours = harness.results(samples=True)
        values = {k: v for k, v in ours["results"][task].items() if isinstance(v, float)}
        served = found[name]["metrics"]
        shared = served.keys() & values.keys()
        assert shared and {k: served[k] for k in shared} == pytest.approx(
            {k: values[k] for k in shared}
        )
        samples = sorted(ours["samples"][task], key=lambda sample: sample["doc_id"])
        for answer, sample in zip(found[name]["answers"], samples, strict=True):
            for (got,), (want,) in zip(answer, sample["resps"], strict=True):
                if isinstance(want, str):
                    assert got == want
                else:
                    assert got[0] == pytest.approx(want[0], abs=1e-3) and got[1] == want[1]
