"""From prompts to token ids and back: text, ids or chat messages in, text out."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from .batch_encoding import check_ends, check_rows, has_mask, to_host, without_padding
from .generation_config import check_generation_config
from .sampling_params import SamplingParams

_SURROGATE = re.compile("[\ud800-\udfff]")
Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]] | Mapping[str, Any]


class RequestError(ValueError):
    """One request is wrong and its completion has the error; other ValueErrors end the call."""


class TokenizerAdapter:
    """A model's tokenizer, which may be missing, with its vocabulary and end-of-text tokens."""

    def __init__(self, model: Any, tokenizer: Any | None):
        if isinstance(tokenizer, str | PathLike):
            name = str(tokenizer)
            raise ValueError(
                f"tokenizer={name!r} is a name: pass AutoTokenizer.from_pretrained({name!r})"
            )
        if tokenizer is not None and not all(
            callable(getattr(tokenizer, name, None)) for name in ("__call__", "decode")
        ):
            raise ValueError(
                f"tokenizer is a {type(tokenizer).__name__}: pass a Hugging Face tokenizer, or None"
            )
        self.tokenizer = tokenizer
        self._model = model
        self._siblings, self._name = _find_embeddings(model)

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer is not None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-text tokens, read each time: training may change them."""
        eos = _first(self._configs, "eos_token_id")
        own = _first([self.tokenizer], "eos_token_id")
        ids = [] if eos is None else [eos] if isinstance(eos, int) else eos
        return frozenset(ids if own is None else [*ids, own])

    @property
    def _configs(self) -> tuple[Any, Any]:
        """The generation_config, which models that cannot generate lack, and the config."""
        return getattr(self._model, "generation_config", None), self._model.config

    @property
    def vocab_size(self) -> int:
        """Rows of the input embeddings, read each time: they may be resized."""
        return int(self._siblings[self._name].weight.shape[0])

    def encode(
        self,
        prompt: Any,
        add_special_tokens: bool = True,
        allow_empty: bool = False,
        vocab_size: int | None = None,
    ) -> np.ndarray:
        """Return the token ids of a prompt; RequestError if the model cannot take it.

        Other ValueErrors end the call: a prompt of a wrong type, or text without a tokenizer.

        vocab_size: that of the model, if the caller knows it; reading it takes time.
        """
        may_be_padded = False
        if _is_id_list(prompt):
            ids, may_be_padded = prompt, True
        elif isinstance(prompt, str):
            tokenizer = self._require("text")
            ids = _call_tokenizer(tokenizer, prompt, add_special_tokens=add_special_tokens)
        elif _is_messages(prompt):
            tokenizer = self._require("messages")
            if getattr(tokenizer, "chat_template", "") is None:
                raise ValueError("messages need a chat template, and the tokenizer has none")
            if any(has_media(message.get("content")) for message in prompt):
                raise RequestError("the engine generates from text: images are for training")
            template = tokenizer.apply_chat_template
            options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
            ids = _call_tokenizer(template, prompt, **options)
        else:
            ids = without_padding(prompt) if isinstance(prompt, Mapping) else to_host(prompt)
            may_be_padded = not has_mask(prompt)
        array = _to_array(ids)
        if may_be_padded:
            check_ends(array, lambda: self._special_token("pad_token_id"))
        self._check_vocabulary(array, vocab_size or self.vocab_size)
        if not array.size and not allow_empty:
            raise RequestError("the prompt is empty; pass at least one token")
        return array

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self._require("text").decode(tokens, skip_special_tokens=True)

    def check_params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters as they apply to this model; ValueError if they do not."""
        check_generation_config(self._configs[0], not params.is_greedy)
        if params.stop:
            params = self._special_stops_to_ids(params)
        for token in (*params.logit_bias, *params.stop_token_ids):
            if token >= self.vocab_size:
                raise ValueError(self._out_of_vocab(token))
        if params.min_tokens and len(self.stop_token_ids(params)) >= self.vocab_size:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but every token ends the text: "
                "name fewer stop_token_ids"
            )
        return params

    def stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a request with these parameters."""
        eos = () if params.ignore_eos else (t for t in self.eos_token_ids if t < self.vocab_size)
        return frozenset((*eos, *params.stop_token_ids))

    def _special_stops_to_ids(self, params: SamplingParams) -> SamplingParams:
        """Turn stop strings that are special tokens into stop token ids: text never shows them."""
        token_of = {stop: self._special_token_id(stop) for stop in params.stop}
        ids = [token for token in token_of.values() if token is not None]
        if not ids:
            return params
        strings = [stop for stop, token in token_of.items() if token is None]
        return replace(params, stop=strings, stop_token_ids=[*params.stop_token_ids, *ids])

    def _special_token_id(self, name: str) -> int | None:
        """Id of the special token with this name, if decoding hides it and the model knows it."""
        tokenizer = self._require("stop strings")
        if not hasattr(tokenizer, "convert_tokens_to_ids"):
            return None
        token = tokenizer.convert_tokens_to_ids(name)
        # Unknown names give the id of the unknown token.
        if token is None or tokenizer.convert_ids_to_tokens(token) != name:
            return None
        hidden = tokenizer.decode([token], skip_special_tokens=False) and not self.decode([token])
        return token if hidden and token < self.vocab_size else None

    def _require(self, purpose: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{purpose} needs a tokenizer: Engine(model, tokenizer)")
        return self.tokenizer

    def _check_vocabulary(self, ids: np.ndarray, vocab_size: int) -> None:
        # As unsigned numbers, negative ids are larger than any vocabulary.
        if ids.size and int(ids.view(np.uint64).max()) >= vocab_size:
            raise RequestError(self._out_of_vocab(int(ids.min() if ids.min() < 0 else ids.max())))

    def check_batch(self, prompts: Sequence[Any]) -> None:
        """Refuse prompts that are the rows of a padded batch, given without their mask."""
        pad = self._special_token("pad_token_id")
        # A single prompt may hold one padding token by chance, or where it also ends texts.
        if pad not in (None, *self.eos_token_ids, self._special_token("bos_token_id")):
            check_rows(prompts, pad)

    def _special_token(self, name: str) -> int | None:
        return _first([self.tokenizer, *self._configs], name)

    def _out_of_vocab(self, token: int) -> str:
        return (
            f"token id {token} is not in the vocabulary of {self.vocab_size}: "
            "is the tokenizer this model's?"
        )


def estimate_tokens(prompt: Any) -> float:
    """Estimated number of tokens: a quarter per character; 1 for anything without a length."""
    if isinstance(prompt, str):
        return len(prompt) / 4
    if isinstance(prompt, Mapping):
        return sum(estimate_tokens(value) for value in prompt.values())
    if isinstance(prompt, (list, tuple)) and prompt and not isinstance(prompt[0], int):
        return sum(estimate_tokens(part) for part in prompt)
    try:
        return len(prompt)
    except TypeError:
        return 1


def _to_array(ids: Any) -> np.ndarray:
    """Return ids as a flat int64 array; ValueError if they are anything but whole numbers."""
    if _is_id_list(ids):
        try:  # NumPy takes twice as long for a list
            return np.frombuffer(bytearray(struct.pack(f"{len(ids)}q", *ids)), np.int64)
        except (struct.error, TypeError):
            pass
    try:
        array = np.asarray(ids)
    except Exception:
        raise ValueError(f"a prompt is a {type(ids).__name__}; pass text, ids, messages") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"a prompt is a {type(ids).__name__}; pass text, a flat list of ids, or messages"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def _call_tokenizer(function: Callable[..., Any], prompt: Any, **options: Any) -> Any:
    """Tokenize; any exception, of whatever type, means that this prompt cannot be tokenized."""
    try:
        return function(prompt, **options)["input_ids"]
    except Exception as error:
        if isinstance(prompt, str) and _SURROGATE.search(prompt):
            raise RequestError(
                "the tokenizer cannot read the prompt: it has a surrogate, half a character"
            ) from None
        raise RequestError(
            f"the tokenizer cannot read the prompt: {type(error).__name__}: {error}"
        ) from error


def _is_id_list(prompt: Any) -> bool:
    """Whether a prompt is a list that starts with an id: the most common kind, found fast."""
    return type(prompt) is list and len(prompt) > 0 and type(prompt[0]) is int


def has_media(content: Any) -> bool:
    """Return whether a message has parts other than text."""
    parts = content if isinstance(content, list) else ()
    return any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts)


def _is_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes))
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


def _find_embeddings(model: Any) -> tuple[dict[str, Any], str]:
    """Return where the input embeddings are: asking the model for them each time is slow."""
    embeddings = model.get_input_embeddings()
    children = ((m._modules, name) for m in model.modules() for name in m._modules)
    return next((modules, name) for modules, name in children if modules[name] is embeddings)


def _first(owners: Iterable[Any], name: str) -> Any:
    """Return the first value of an attribute that is set; configs and tokenizers may lack it."""
    return next((t for owner in owners if (t := getattr(owner, name, None)) is not None), None)
