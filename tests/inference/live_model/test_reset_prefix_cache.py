"""`Engine.forget`: cached prefixes are computed again; requests under way go on."""

from __future__ import annotations

from nopad.inference import Engine

GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
PROMPT = [5 + i % 60 for i in range(40)]
ANEW, CACHED = 40 + 4, 8 + 4  # 32 of the 40 lie in whole strides; the last new token is not run


def run(engine: Engine, prompt: list[int] = PROMPT) -> tuple[int, list[int]]:
    """How many tokens went through the model for a prompt, and what it said."""
    before = engine.stats.num_computed_tokens
    (done,) = engine.generate([prompt], GREEDY)
    return engine.stats.num_computed_tokens - before, done.token_ids


def test_after_forgetting_a_prompt_is_computed_anew(tiny):
    engine = Engine(tiny("llama"), page_size=16)
    ran, said = run(engine)
    assert ran == ANEW
    assert run(engine) == (CACHED, said)
    engine.reset_prefix_cache()
    assert run(engine) == (ANEW, said)
    assert run(engine) == (CACHED, said)


def test_nothing_to_forget_before_the_first_call_and_after_release(tiny):
    engine = Engine(tiny("llama"), page_size=16)
    engine.reset_prefix_cache()
    assert engine._executor is None
    run(engine)
    engine.release()
    engine.reset_prefix_cache()
    assert engine._executor is None and run(engine)[0] == ANEW


def test_requests_under_way_go_on_as_if_nothing_was_forgotten(tiny):
    engine = Engine(tiny("llama"), page_size=16, debug=True)
    _, said = run(engine)
    engine.add_request(PROMPT, GREEDY)
    done = None
    while done is None:
        engine.reset_prefix_cache()
        done = next((e.completion for e in engine.step() if e.completion is not None), None)
    assert done.token_ids == said and engine.stats.preemptions == 0
