"""From what a caller gives to token ids and back: text, ids or chat messages in, text out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .sampling_params import SamplingParams

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]


class TokenizerAdapter:
    """What a tokenizer and a model's settings say about tokens; the tokenizer may be missing."""

    def __init__(self, model: Any, tokenizer: Any | None):
        self.tokenizer = tokenizer
        self._among, self._name = _embeddings(model)
        self.ends = _end_tokens(model, tokenizer)

    @property
    def vocabulary(self) -> int:
        """Tokens the model knows now: embeddings may be resized."""
        return int(self._among[self._name].weight.shape[0])

    def encode(self, prompt: Any, special: bool = True, empty: bool = False) -> np.ndarray:
        """Turn a prompt into token ids the model can take; raise ValueError if it is none.

        special: let the tokenizer add its own tokens, such as that of the beginning.
        empty: take a prompt of no tokens as well.
        """
        if isinstance(prompt, str):
            ids = _ids_of(self._require("text"), prompt, add_special_tokens=special)
        elif _is_messages(prompt):
            tokenizer = self._require("messages")
            if getattr(tokenizer, "chat_template", "") is None:
                raise ValueError("messages need a chat template, and the tokenizer has none")
            template = tokenizer.apply_chat_template
            how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
            ids = _ids_of(template, prompt, **how)
        else:
            ids = prompt
        array = self._checked(ids)
        if not array.size and not empty:
            raise ValueError("the prompt is empty; give at least one token")
        return array

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        return self._require("text").decode(tokens, skip_special_tokens=True)

    def check_params(self, params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """Make sampling settings of what was given, and see that this model can follow them."""
        if params is None:
            params = SamplingParams()
        if isinstance(params, Mapping):
            try:
                params = SamplingParams(**params)
            except TypeError as error:
                raise ValueError(f"sampling parameters: {error}") from None
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling parameters are a {type(params).__name__}; give SamplingParams"
            )
        if params.stop:
            params = self._stopping_by_ids(params)
        for token in (*params.logit_bias, *params.stop_token_ids):
            if token >= self.vocabulary:
                raise ValueError(self._unknown(token))
        return params

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a request with these settings."""
        own = () if params.ignore_eos else (end for end in self.ends if end < self.vocabulary)
        return frozenset((*own, *params.stop_token_ids))

    def _stopping_by_ids(self, params: SamplingParams) -> SamplingParams:
        """Let stop strings that are special tokens stop by their ids: no text ever shows them."""
        found = {stop: self._special(stop) for stop in params.stop}
        ids = [token for token in found.values() if token is not None]
        if not ids:
            return params
        texts = [stop for stop, token in found.items() if token is None]
        return replace(params, stop=texts, stop_token_ids=[*params.stop_token_ids, *ids])

    def _special(self, stop: str) -> int | None:
        """The token of this name, if decoding leaves it out and the model can make it."""
        tokenizer = self._require("stop strings")
        if not hasattr(tokenizer, "convert_tokens_to_ids"):
            return None
        token = tokenizer.convert_tokens_to_ids(stop)
        if token is None or tokenizer.convert_ids_to_tokens(token) != stop:  # or it is unknown
            return None
        hidden = tokenizer.decode([token], skip_special_tokens=False) and not self.decode([token])
        return token if hidden and token < self.vocabulary else None

    def _require(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer: Engine(model, tokenizer)")
        return self.tokenizer

    def _checked(self, ids: Any) -> np.ndarray:
        try:
            array = np.asarray(ids)
        except Exception:
            raise ValueError(
                f"a prompt is a {type(ids).__name__}; give text, ids, messages"
            ) from None
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"a prompt is a {type(ids).__name__}; give text, a flat list of ids, or messages"
            )
        if array.size and (array.min() < 0 or array.max() >= self.vocabulary):
            worst = int(array.min()) if array.min() < 0 else int(array.max())
            raise ValueError(self._unknown(worst))
        return np.ascontiguousarray(array, dtype=np.int64)

    def _unknown(self, token: int) -> str:
        known = f"the vocabulary of {self.vocabulary}"
        return f"token id {token} is not in {known}: is the tokenizer this model's?"


def identity(prompt: np.ndarray) -> int:
    """A number for a prompt's content, the same wherever it runs."""
    return int.from_bytes(hashlib.blake2b(prompt.tobytes(), digest_size=8).digest(), "little")


def _ids_of(read: Callable[..., Any], prompt: Any, **how: Any) -> Any:
    """Let a tokenizer read a prompt: whatever it raises, and it may be anything, is about that."""
    try:
        return read(prompt, **how)["input_ids"]
    except Exception as error:
        raise ValueError(
            f"the tokenizer cannot read the prompt: {type(error).__name__}: {error}"
        ) from error


def _is_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes))
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


def _embeddings(model: Any) -> tuple[dict[str, Any], str]:
    """Where a model keeps its input embeddings: asking it each time takes long."""
    own = model.get_input_embeddings()
    places = ((m._modules, name) for m in model.modules() for name in m._modules)
    return next((among, name) for among, name in places if among[name] is own)


def _end_tokens(model: Any, tokenizer: Any | None) -> frozenset[int]:
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config):
        ends = getattr(holder, "eos_token_id", None)
        if ends is not None:
            found.update([ends] if isinstance(ends, int) else ends)
            break
    if getattr(tokenizer, "eos_token_id", None) is not None:
        found.add(tokenizer.eos_token_id)  # pyright: ignore[reportOptionalMemberAccess]
    return frozenset(found)
