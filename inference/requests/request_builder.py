"""From prompts to requests: tokenize, limit the length, assign seeds.

    PromptSpec ─▶ EncodedPrompt ─▶ RequestGroup      one prompt at a time, while steps run

A wrong call (text without a tokenizer, a prompt of a wrong type) raises. If the model or its cache
cannot take one prompt, the completion of that prompt has an error and the others continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from .draws import Draws, prompt_hash, stream_seed
from .output_processor import RequestGroup
from .prompt_spec import PromptSpec
from .request import Request
from .tokenizer_adapter import RequestError, TokenizerAdapter, estimate_tokens


class EncodedPrompt(NamedTuple):
    """A prompt as token ids, or the reason why it has none."""

    prompt_index: int
    """Its position among the prompts of the call."""
    group_id: int
    """Id of its group; the next `n` numbers are the ids of its requests."""
    spec: PromptSpec
    """With the parameters as they apply to this model."""
    stop_token_ids: frozenset[int]
    token_ids: np.ndarray | None
    error: str | None


class RequestBuilder:
    """Build groups of requests, numbered in the order they arrive."""

    def __init__(
        self, tokenizer: TokenizerAdapter, seed: int, max_model_len: int, limit_reason: str = ""
    ):
        """Start numbering at 0; limit_reason: why `max_model_len` cannot be raised."""
        self.tokenizer = tokenizer
        self._seed = seed
        self._max_model_len = max_model_len
        self._limit_reason = limit_reason
        self._next_id = 0

    def encode(self, specs: Sequence[PromptSpec]) -> Iterator[EncodedPrompt]:
        """Check the parameters, then tokenize each prompt when it is taken, in running order.

        Prompts of a wrong type raise ValueError.
        """
        self.tokenizer.check_batch([spec.prompt for spec in specs])
        distinct = {id(spec.params): spec.params for spec in specs}
        checked = {key: self.tokenizer.check_params(params) for key, params in distinct.items()}
        stops = {key: self.tokenizer.stop_token_ids(params) for key, params in checked.items()}
        ids = [*accumulate((1 + spec.params.n for spec in specs), initial=self._next_id)]
        self._next_id, vocab_size = ids[-1], self.tokenizer.vocab_size

        def encode_one(index: int) -> EncodedPrompt:
            spec, tokens, error = specs[index], None, None
            try:
                tokens = self.tokenizer.encode(spec.prompt, vocab_size=vocab_size)
            except RequestError as fault:
                error = str(fault)
            except ValueError as fault:
                raise ValueError(f"prompt {index}: {fault}") from None
            except Exception as fault:
                name = type(fault).__name__
                raise ValueError(f"prompt {index}: {name}: {fault}") from fault
            key = id(spec.params)
            spec = spec._replace(params=checked[key])
            return EncodedPrompt(index, ids[index], spec, stops[key], tokens, error)

        return map(encode_one, running_order(specs, self._max_model_len))

    def build_group(
        self, prompt: EncodedPrompt, draws: Draws, now: float, cache_tokens: int, streaming: bool
    ) -> RequestGroup:
        """Return the `n` requests of one prompt; cache_tokens: capacity of the KV cache."""
        ids, params = prompt.token_ids, prompt.spec.params
        group = RequestGroup(prompt.group_id, self.tokenizer, streaming)
        group.prompt_token_ids = ids
        try:
            if ids is None:
                raise RequestError(prompt.error)
            max_len = self.max_len(len(ids), params.max_tokens, cache_tokens)
        except RequestError as error:
            group.fail(str(error))
            return group
        group.requests = [
            Request(
                id=request_id,
                prompt_token_ids=ids,
                max_len=max_len,
                params=params,
                seed=seed,
                priority=prompt.spec.priority,
                deadline=now + prompt.spec.seconds,
                stop_token_ids=prompt.stop_token_ids,
                score_from=None if params.prompt_logprobs is None else 1,
                needs_host_check=streaming or bool(params.stop) or params.logprobs is not None,
            )
            for request_id, seed in enumerate(self._seeds(prompt, ids, draws), group.id + 1)
        ]
        return group

    def _seeds(self, prompt: EncodedPrompt, ids: np.ndarray, draws: Draws) -> list[int]:
        params, samples = prompt.spec.params, range(prompt.spec.params.n)
        if params.is_greedy:
            return [0] * params.n  # nothing is drawn
        if params.seed is None:
            return [draws.seed(self._seed, prompt.prompt_index, sample) for sample in samples]
        key = prompt_hash(ids)  # the same numbers wherever the prompt is among others
        return [stream_seed(params.seed, key, sample) for sample in samples]

    def max_len(self, prompt_len: int, max_tokens: int, cache_tokens: int) -> int:
        """Return the maximum length of a request; RequestError if model or cache are too small."""
        longest = self._max_model_len
        if prompt_len + (max_tokens > 0) > longest:
            advice = "shorten it, or raise max_model_len if the model allows"
            if self._limit_reason:
                advice = f"shorten it, since for this model {self._limit_reason}"
            raise RequestError(
                f"the prompt has {prompt_len} tokens and the engine's max_model_len is {longest}: "
                f"{advice}"
            )
        max_len = min(prompt_len + max_tokens, longest)
        if max_len - 1 > cache_tokens:
            raise RequestError(
                f"prompt and max_tokens may reach {max_len} tokens, the cache holds "
                f"{cache_tokens}: lower max_tokens or give the engine more memory"
            )
        return max_len

    def new_id(self) -> int:
        """Return the next free id of a group or request."""
        self._next_id += 1
        return self._next_id - 1


def running_order(specs: Sequence[PromptSpec], max_model_len: int) -> list[int]:
    """Return the order to run prompts in: by priority, then the most new tokens, then the longest.

    A request takes one step per new token. If the longest request starts first, the others are
    prefilled in steps that it needs anyway, and few steps at the end have few requests.
    """
    keys = []
    for prompt, params, priority, _ in specs:
        num_tokens = estimate_tokens(prompt)
        num_left = max_model_len - num_tokens
        keys.append((priority, -min(params.max_tokens, num_left), -num_tokens))
    return sorted(range(len(specs)), key=keys.__getitem__)
