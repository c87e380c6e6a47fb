"""The one fake tokenizer: one token per byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass
class FakeTokenizer:
    """A tokenizer of one token per byte; by default one printable letter per token.

    encoding: "latin-1" for one character per byte; with "utf-8", characters span several tokens.
    to_token, to_byte: how bytes become tokens, and tokens bytes.
    hidden: ids below this one decode to nothing.
    add_bos: whether prompts start with `bos_token_id`.
    special_tokens: names of special tokens by id; unknown names have id 0.
    """

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    encoding: str = "latin-1"
    to_token: Callable[[int], int] = lambda byte: byte - 32
    to_byte: Callable[[int], int] = lambda token: token + 32
    hidden: int = 0
    add_bos: bool = False
    special_tokens: Mapping[int, str] = field(default_factory=dict)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        start = [self.bos_token_id] if self.add_bos and add_special_tokens else []
        return {"input_ids": [*start, *(self.to_token(b) for b in text.encode(self.encoding))]}

    def decode(self, tokens, skip_special_tokens: bool = True) -> str:
        skipped = self.special_tokens if skip_special_tokens else {}
        shown = [t for t in tokens if t >= self.hidden and t not in skipped]
        return bytes(self.to_byte(t) for t in shown).decode(self.encoding, errors="replace")

    def apply_chat_template(self, messages, **_) -> dict[str, list[int]]:
        return self("".join(message["content"] for message in messages))

    def convert_tokens_to_ids(self, name: str) -> int | None:
        unknown = 0 if self.special_tokens else None
        return next((t for t, known in self.special_tokens.items() if known == name), unknown)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.special_tokens.get(token, chr(32 + token))
