"""The debug check of the KV cache: it sees wrong slots, pages, positions, tokens and weights."""

from __future__ import annotations

import pytest
from nopad.inference import Engine, SamplingParams
from nopad.inference.scheduling import loop

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

CORRUPTIONS = {
    "two slots swapped": lambda s: s.kv_slots.__setitem__(slice(0, 2), s.kv_slots[[1, 0]]),
    "a slot one off": lambda s: s.kv_slots.__setitem__(0, s.kv_slots[0] + 1),
    "all slots one off": lambda s: s.kv_slots.__iadd__(1),
    "a negative slot": lambda s: s.kv_slots.__setitem__(0, -1),
    "a position one off": lambda s: s.positions.__setitem__(-1, s.positions[-1] + 1),
    "positions from zero": lambda s: s.positions.__isub__(1),
    "another's page": lambda s: s.page_table.__setitem__((0, 0), s.page_table[-1, 0]),
    "pages swapped": lambda s: s.page_table.__setitem__((0, slice(0, 2)), s.page_table[0, [1, 0]]),
    "a wrong token": lambda s: s.token_ids.__setitem__(0, s.token_ids[0] + 1),
    "a page never written": lambda s: s.page_table.__setitem__((0, 0), 7),
}


@pytest.mark.parametrize("fault", CORRUPTIONS)
def test_the_checker_sees_every_corruption(tiny, fault, monkeypatch):
    """B8: ten corruptions of a step's arrays; without them the checker does not raise."""
    memory = 8 * 16 * 2 * 2 * 2 * 8 * 4
    prompts = [list(range(3, 23)), list(range(40, 62))]
    Engine(tiny("llama"), page_size=16, memory=memory, debug=True).generate(prompts, GREEDY)
    engine = Engine(tiny("llama"), page_size=16, memory=memory, debug=True)
    build_step = loop.build_step

    def corrupt(*args):
        step = build_step(*args)
        CORRUPTIONS[fault](step)
        return step

    monkeypatch.setattr(loop, "build_step", corrupt)
    with pytest.raises(AssertionError, match="KV slot"):
        engine.generate(prompts, GREEDY)


def test_keys_of_other_weights_are_seen(tiny):
    engine = Engine(tiny("llama"), page_size=16, debug=True)
    prompt = list(range(3, 43))
    engine.generate([prompt], GREEDY)
    scheduler = engine._executor.loop.scheduler
    scheduler.pages.attach_prefix(
        "thief", prompt, scheduler.cache_salt
    )  # stays cached under the old version
    scheduler.pages.free("thief")
    real = scheduler.pages.attach_prefix
    scheduler.pages.attach_prefix = lambda owner, tokens, scope: real(owner, tokens, "1")
    scheduler.cache_salt = "changed"
    with pytest.raises(AssertionError, match="does not hold its token"):
        engine.generate([prompt], GREEDY)
