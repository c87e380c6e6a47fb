"""Sampling: each parameter against its definition; samples depend on their request alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nopad.inference import Engine, SamplingParams
from nopad.inference.execution.sampler import gather_logprobs, sample
from nopad.inference.requests.draws import stream_seed, uniform
from nopad.inference.scheduling.step import Filters, LogitEdits, Penalties, SamplingInputs

V = 23


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed)) * 2


def inputs(temperature, uniform, k=0, p=1.0, m=0.0) -> SamplingInputs:
    n = len(uniform)
    filters = Filters(
        torch.arange(n), torch.full((n,), k), torch.full((n,), p), torch.full((n,), m)
    )
    u = torch.tensor(uniform, dtype=torch.float64)
    return SamplingInputs(None, None, torch.full((n,), temperature), u, filters)


def expected_distribution(logits, temperature, k, p, m) -> np.ndarray:
    """The distribution by definition: top-k, then top-p and min-p of the rest."""
    z = logits.double().numpy() / temperature
    order = np.argsort(-z, kind="stable")
    keep = np.zeros(len(z), bool)
    kept = order[: k or len(z)]
    q = np.exp(z[kept] - z.max())
    q /= q.sum()
    before = np.cumsum(q) - q
    fine = (before < p if p < 1 else True) & (q >= m * q[0])
    fine[0] = True
    keep[kept[fine]] = True
    probabilities = np.where(keep, np.exp(z - z.max()), 0)
    return probabilities / probabilities.sum()


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 3, 40]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.9]),
    st.floats(0, 0.999999),
)
def test_a_draw_inverts_the_filtered_distribution(seed, temperature, k, p, m, u):
    logits = rows(1, seed)
    token = int(sample(logits, inputs(temperature, [u], k, p, m))[0])
    cdf = np.cumsum(expected_distribution(logits[0], temperature, k, p, m))
    assert cdf[token] > u - 1e-5 and (token == 0 or cdf[token - 1] <= u + 1e-5)


def test_many_draws_have_the_distribution_they_should():
    logits = rows(1, 5)
    u = uniform(np.full(20000, 9), np.arange(20000))
    tokens = sample(logits.expand(len(u), -1), inputs(0.8, u.tolist(), 0, 0.9, 0.0))
    frequencies = np.bincount(tokens.numpy(), minlength=V) / len(u)
    np.testing.assert_allclose(
        frequencies, expected_distribution(logits[0], 0.8, 0, 0.9, 0.0), atol=0.012
    )


def test_uniforms_are_uniform_and_independent_of_each_other():
    u = uniform(np.repeat(np.arange(100), 100), np.tile(np.arange(100), 100))
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 45  # chi-square, 19 degrees of freedom
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    assert len({stream_seed(s, r, n) for s in range(9) for r in range(9) for n in range(9)}) == 729


def test_penalties_follow_their_definitions():
    logits = rows(2, 3)
    history = torch.tensor([[1, 2, 2, 5, 9, 9], [3, 3, 3, 3, 0, 0]])
    penalties = Penalties(
        torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([2, 1]), torch.tensor([5, 4]),
        torch.tensor([1.3, 1.0]), torch.tensor([0.5, 0.0]), torch.tensor([0.0, 0.7]),
    )  # fmt: skip
    want = logits.clone()
    for token in {1, 2, 5, 9}:  # prompt and output; the last 9 is past its length
        x = want[0, token]
        want[0, token] = x / 1.3 if x > 0 else x * 1.3
    for token in {2, 5, 9}:
        want[0, token] -= 0.5
    want[1, 3] -= 0.7 * 3
    for row, cdf in enumerate(want.double().softmax(-1).cumsum(-1)):
        begins = torch.cat([torch.zeros(1), cdf[:-1]])
        uniform = torch.cat([begins + 1e-5, cdf - 1e-5])  # each end of each token's interval
        one = Penalties(torch.arange(2 * V), *(each[row].expand(2 * V) for each in penalties[1:]))
        drawn = SamplingInputs(temperature=torch.ones(2 * V), uniform=uniform, penalties=one)
        tokens = sample(logits[row].expand(2 * V, -1), drawn, history)
        assert tokens.tolist() == [*range(V)] * 2


def test_bias_and_bans_change_single_logits_only():
    logits = rows(3, 4)
    best = int(logits[0].argmax())
    edits = LogitEdits(
        torch.tensor([0, 1]), torch.tensor([best, 7]), torch.tensor([-torch.inf, 100.0])
    )
    got = sample(logits, SamplingInputs(edits=edits)).tolist()
    assert got[0] == int(logits[0].topk(2).indices[1]) and got[1] == 7
    assert got[2] == int(logits[2].argmax())


def test_logits_that_are_no_numbers_fail_their_row_alone():
    logits = rows(3, 6)
    logits[1, 4] = torch.nan
    for sampling in (SamplingInputs(), inputs(1.0, [0.3, 0.3, 0.3])):
        tokens = sample(logits, sampling).tolist()
        assert tokens[1] == -1 and min(tokens[0], tokens[2]) >= 0


@pytest.mark.parametrize("knobs", [{}, {"k": 1}, {"k": 3, "p": 0.5}, {"m": 0.1}])
def test_rows_without_a_distribution_fail_alone(knobs):
    logits = rows(4, 6)
    logits[1, 4], logits[2] = torch.inf, -torch.inf
    tokens = sample(logits, inputs(1.0, [0.5] * 4, **knobs)).tolist()
    assert tokens[1] == tokens[2] == -1 and min(tokens[0], tokens[3]) >= 0
    tokens = sample(logits * 1e38, inputs(0.5, [0.5] * 4, **knobs)).tolist()
    assert set(tokens) == {-1}, "divided by the temperature, they overflow"
    temperature = torch.tensor([0.0, 0.0, 1.0, 1.0])
    uniform = torch.full((4,), 0.5, dtype=torch.float64)
    tokens = sample(logits, SamplingInputs(temperature=temperature, uniform=uniform)).tolist()
    assert tokens[1] == 4 and tokens[2] == -1, "greedy rows take the largest"


def test_infinite_logits_end_a_sampled_request_with_an_error(tiny):
    model = tiny("llama")
    hook = model.lm_head.register_forward_hook(lambda *io: io[2].index_fill(-1, HOT, torch.inf))
    try:
        hot = SamplingParams(temperature=0.7, max_tokens=3, seed=0)
        greedy = SamplingParams(temperature=0, max_tokens=3)
        bad, good = Engine(model).generate([[3, 4], [5, 6]], [hot, greedy])
    finally:
        hook.remove()
    assert bad.finish_reason == "error" and "NaN or infinite" in bad.error and not bad.token_ids
    assert good.token_ids == [5, 5, 5] and good.error is None


HOT = torch.tensor([5])


def test_likelihoods_are_log_softmax():
    logits = rows(4, 8)
    tokens = torch.tensor([0, 5, int(logits[2].argmax()), 22])
    logprobs = gather_logprobs(logits, tokens, 3)
    want = logits.log_softmax(-1)
    torch.testing.assert_close(logprobs.logprob, want[torch.arange(4), tokens])
    torch.testing.assert_close(logprobs.top_logprobs, want.topk(3).values)
    assert logprobs.is_greedy.tolist()[2] is True


PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}


@pytest.mark.parametrize("knobs", [{}, {"top_k": 5}, {"top_p": 0.8, "min_p": 0.02}, PENALTIES])
def test_samples_do_not_depend_on_batch_order_chunks_or_preemption(tiny, knobs):
    model = tiny("llama")
    prompts = [[3 + i, 5, 8 + 2 * i] * (1 + 3 * i) for i in range(5)]
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=9, ignore_eos=True, **knobs)
    alone = [Engine(model).generate([p], params)[0].token_ids for p in prompts]
    assert len({tuple(t) for t in alone}) == len(prompts)
    together = [c.token_ids for c in Engine(model).generate(prompts, params)]
    assert together == alone
    back = [c.token_ids for c in Engine(model).generate(prompts[::-1], params)]
    assert back[::-1] == alone
    # Memory for 5 pages of 16 tokens: requests are preempted.
    tight = Engine(model, memory=5 * 16 * 2 * 2 * 2 * 8 * 4, page_size=16, max_num_batched_tokens=7)
    assert [c.token_ids for c in tight.generate(prompts, params)] == alone
    assert tight.stats.preemptions > 0


def test_greedy_with_sampled_neighbours_stays_greedy(tiny):
    model = tiny("llama")
    prompts = [[3, 4, 5], [6, 7, 8]]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    hot = SamplingParams(temperature=1.5, max_tokens=8, seed=1, logprobs=2)
    mixed = Engine(model).generate(prompts, [greedy, hot])
    assert mixed[0].token_ids == Engine(model).generate([prompts[0]], greedy)[0].token_ids
    assert mixed[0].logprobs is None and len(mixed[1].logprobs) == len(mixed[1].token_ids)


def test_n_completions_share_their_prompt_and_differ(tiny):
    engine = Engine(tiny("llama"), page_size=16)
    prompt = list(range(3, 83))
    params = SamplingParams(temperature=1.0, n=4, max_tokens=3, seed=2, ignore_eos=True)
    (done,) = engine.generate([prompt], params)
    every = [done, *done.others]
    assert len({tuple(c.token_ids) for c in every}) == 4
    # The prompt once, the last 16 tokens for each of the others, two decodes each.
    assert engine.stats.num_computed_tokens == 80 + 3 * 16 + 4 * 2


def test_the_same_prompt_twice_without_a_seed_is_answered_twice(tiny):
    hot = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    one, two = Engine(tiny("llama")).generate([[3, 4], [3, 4]], hot)
    assert one.token_ids != two.token_ids
    seeded = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=0)
    one, two = Engine(tiny("llama")).generate([[3, 4], [3, 4]], seeded)
    assert one.token_ids == two.token_ids


def test_the_same_prompt_submitted_again_is_answered_anew(tiny):
    engine = Engine(tiny("llama"), max_num_seqs=2)
    hot = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}

    def submitted(count: int, **more) -> list[list[int]]:
        """Add requests while earlier ones run or after they ended; return all token lists."""
        order, done = [], {}
        while len(done) < count:
            if len(order) < count:
                order.append(engine.add_request([3, 4], hot | more))
            done |= {e.request_id: e.completion.token_ids for e in engine.step() if e.completion}
        return [done[number] for number in order]

    answers = [*submitted(12), *submitted(12)]
    answers += [c.token_ids for c in engine.generate([[3, 4]] * 12, hot)]
    assert len({tuple(tokens) for tokens in answers}) == 36
    assert submitted(3, seed=0) == [submitted(1, seed=0)[0]] * 3


def test_prompt_logprobs_and_logprobs_equal_a_plain_forward(tiny):
    model = tiny("llama")
    prompt = [5, 9, 30, 31, 7]
    params = SamplingParams(
        temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    (done,) = Engine(model, max_num_batched_tokens=2).generate([prompt], params)
    with torch.no_grad():
        want = model(torch.tensor([prompt + done.token_ids])).logits[0].log_softmax(-1)
    assert done.prompt_logprobs[0] is None
    for place, entry in enumerate(done.prompt_logprobs[1:], start=1):
        assert entry.token_id == prompt[place]
        assert abs(entry.logprob - float(want[place - 1, prompt[place]])) < 1e-5
        assert list(entry.top_logprobs) == want[place - 1].topk(2).indices.tolist()
    for place, entry in enumerate(done.logprobs, start=len(prompt)):
        assert abs(entry.logprob - float(want[place - 1, entry.token_id])) < 1e-5
        assert len(entry.top_logprobs) == 3


def test_min_tokens_holds_the_end_back_and_stop_ids_end(tiny):
    model = tiny("llama")
    free = Engine(model).generate(
        [[3, 4, 5]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    )[0]
    end = free.token_ids[2]
    first = free.token_ids.index(end)
    stopped = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[end], ignore_eos=True)
    got = Engine(model).generate([[3, 4, 5]], stopped)[0]
    assert got.token_ids == free.token_ids[: first + 1] and got.finish_reason == "stop"
    held = SamplingParams(
        temperature=0, max_tokens=20, min_tokens=10, stop_token_ids=[end], ignore_eos=True
    )
    later = Engine(model).generate([[3, 4, 5]], held)[0]
    assert len(later.token_ids) >= 10 and end not in later.token_ids[:10]


def test_a_temperature_too_small_to_divide_by_is_greedy(tiny):
    engine = Engine(tiny("llama"))
    greedy, faint = (
        SamplingParams(temperature=t, max_tokens=6, ignore_eos=True) for t in (0, 1e-42)
    )
    assert engine.generate([[3, 4, 5]], faint) == engine.generate([[3, 4, 5]], greedy)


@pytest.mark.parametrize(
    "knobs",
    [{"temperature": 0.6}, {"top_k": 5, "temperature": 1.3}, {"top_p": 0.7}, {"min_p": 0.1},
     {"logit_bias": {7: 2.0}}, {"repetition_penalty": 1.5, "presence_penalty": 0.5},
     {"temperature": 0, "frequency_penalty": 0.5}],
)  # fmt: skip
def test_processed_logprobs_are_those_of_the_distribution_sampled_from(tiny, knobs):
    prompt, neighbour = [3, 4, 5], SamplingParams(max_tokens=5, seed=3, logprobs=0)
    params = SamplingParams(
        max_tokens=5, seed=1, logprobs=0, logprobs_mode="processed", ignore_eos=True, **knobs
    )
    model = tiny("llama")
    done, beside = Engine(model).generate([prompt, [8, 9]], [params, neighbour])
    got = [entry.logprob for entry in done.logprobs]
    ids = prompt + done.token_ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    for place, row in enumerate(logits):
        seen, made = ids[: len(prompt) + place], done.token_ids[:place]
        want = np.log(_distribution(row.clone(), seen, made, **knobs)[ids[len(seen)]])
        assert abs(got[place] - want) < 1e-4
    alone = Engine(model).generate([[8, 9]], neighbour)[0]
    assert [entry.logprob for entry in beside.logprobs] == pytest.approx(
        [entry.logprob for entry in alone.logprobs], abs=1e-5
    )


def _distribution(row, seen, made, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=(),
                  repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0):  # fmt: skip
    """The distribution that one token is sampled from, by definition."""
    for token in logit_bias:
        row[token] += logit_bias[token]
    for token in set(seen):
        row[token] = (
            row[token] / repetition_penalty if row[token] > 0 else row[token] * repetition_penalty
        )
    for token in set(made):
        row[token] -= presence_penalty + frequency_penalty * made.count(token)
    return expected_distribution(row, temperature or 1.0, top_k, top_p, min_p)
