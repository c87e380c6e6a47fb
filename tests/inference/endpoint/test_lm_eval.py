"""lm_eval through the live endpoint, in the middle of a training, scores as in this process."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from threading import Thread

import lm_tasks
import pytest
import torch
import warm_python
from nopad.inference import Engine
from nopad.inference.endpoint import serve
from nopad.inference.harness import Harness
from nopad.trainer.evaluation.live_requests import answer_requests
from small_checkpoint import random_model, small_tokenizer

CLIENT = Path(__file__).parents[1] / "support" / "lm_eval_client.py"


def train(tokenizer, steps: int | None = None, client=None):
    """Train with dropout-like noise; the learning rate is 0 from the fourth step on.

    Without a number of steps, until the client is done. Returns the model, its optimizer's state
    and the number of steps.
    """
    torch.manual_seed(1)
    model = random_model(tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    server = thread = None
    if client is not None:
        engine = Engine(model, tokenizer)
        server = serve(engine, port=0, token="t", model_name="model", when="step", max_share=1.0)
        thread = Thread(target=client, args=(server,))
        thread.start()
    step = 0
    while step != steps and (steps is not None or thread.is_alive()):
        optimizer.param_groups[0]["lr"] = 1e-2 if step < 3 else 0.0
        ids = torch.randint(len(tokenizer), (1, 12))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if server is not None:
            time.sleep(0.03 if step > 3 and not server.is_due() else 0)
            answer_requests(server, step, model)
    if server is not None:
        server.close()
    moments = [v for s in optimizer.state.values() for v in s.values()]
    return model, [*model.state_dict().values(), *moments, torch.get_rng_state()], step


@pytest.mark.slow
def test_lm_eval_through_the_endpoint_scores_as_in_this_process(tmp_path):
    tokenizer, found = small_tokenizer(), {}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    lm_tasks.write_tasks(tmp_path, 12)
    paths = [str(tmp_path / "tokenizer"), str(tmp_path)]

    def client(server) -> None:
        ran = warm_python.run([CLIENT, server.url, "t", *paths], env=dict(os.environ), timeout=300)
        assert ran.returncode == 0, ran.stderr[-3000:]
        found.update(json.loads(ran.stdout.splitlines()[-1]))

    model, state, steps = train(tokenizer, client=client)
    assert steps > 3, "lm_eval asks in the middle of the training"
    _, without, _ = train(tokenizer, steps)
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
