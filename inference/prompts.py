"""From what a caller gives to token ids and back: text, ids or chat messages in, text out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .params import SamplingParams

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]


class Tongue:
    """What a tokenizer and a model's settings say about tokens; the tokenizer may be missing."""

    def __init__(self, model: Any, tokenizer: Any | None):
        self.tokenizer = tokenizer
        self._among, self._name = _embeddings(model)
        self.ends = _end_tokens(model, tokenizer)

    @property
    def vocabulary(self) -> int:
        """Tokens the model knows now: embeddings may be resized."""
        return int(self._among[self._name].weight.shape[0])

    def encode(self, prompt: Any, special: bool = True) -> np.ndarray:
        """Turn a prompt into token ids the model can take; raise ValueError if it is none."""
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
        return self._checked(ids)

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
            self._require("stop strings")
        for token in (*params.logit_bias, *params.stop_token_ids):
            if token >= self.vocabulary:
                raise ValueError(f"token {token} is not in the vocabulary of {self.vocabulary}")
        return params

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a request with these settings."""
        own = frozenset[int]() if params.ignore_eos else self.ends
        return own | frozenset(params.stop_token_ids)

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
        if not array.size:
            raise ValueError("the prompt is empty; give at least one token")
        if array.min() < 0 or array.max() >= self.vocabulary:
            worst = int(array.min()) if array.min() < 0 else int(array.max())
            raise ValueError(f"token id {worst} is not in the vocabulary of {self.vocabulary}")
        return np.ascontiguousarray(array, dtype=np.int64)


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
