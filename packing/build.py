"""From what the user said to a sequence of packs: planned where lengths are known, else sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .encoding.ahead import SMALL, encode_ahead, filled
from .encoding.encoder import Encoder
from .encoding.report import SkippedRows
from .ordering.mixture import Stop, Weight
from .planning.overflow import limit
from .readers.planned import PlannedPacks
from .readers.shard import ShardSettings
from .readers.sharded import StreamedPacks
from .sources import RowSource, open_source
from .sources.in_memory import Listed
from .sources.source import Indexed
from .sources.token_store import TokenArray, TokenStore
from .state.fingerprint import Fingerprint, tokenizer_fingerprint

WINDOW = 1024
"""Rows that a stream shuffles together unless the user says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The user's settings that shape the sequence of packs."""

    packer: dict[str, Any]
    encoder: Encoder
    seed: int
    shuffle: bool | int
    shards: int | None
    ahead: bool | None
    stop: Stop
    level: bool
    packs: int | None
    skip: bool


def open_sources(pairs: list[tuple[Any, Weight]], encoder: Encoder, **options: Any) -> list:
    """Open the sources of a mixture, each under its number."""
    return [
        open_source(source, column=encoder.column, eos=encoder.eos, number=number, **options)
        for number, (source, _) in enumerate(pairs)
    ]


def build(
    opened: list, weights: list[Weight], choices: PipelineOptions, skipped: SkippedRows
) -> PlannedPacks | StreamedPacks:
    """Plan everything if every length is known or cheap to find out, else shard."""
    streams = [one for one in opened if isinstance(one, RowSource) and not _ahead(one, choices)]
    if not streams:
        return _planned(opened, weights, choices, skipped)
    if choices.level:
        raise ValueError("level=True needs known lengths: pass ready tokens, or ahead=True")
    sources = [_as_rows(one, number) for number, one in enumerate(opened)]
    shards = choices.shards
    if shards is None:
        shards = min(source.shards or 8 for source in sources)
    return StreamedPacks(
        ShardSettings(
            sources=sources,
            weights=weights,
            stop=choices.stop,
            encoder=choices.encoder,
            packer=choices.packer,
            shards=shards,
            seed=choices.seed,
            window=_window(choices.shuffle),
            skip=choices.skip,
        ),
        choices.packs,
    )


def _planned(opened, weights, choices: PipelineOptions, skipped: SkippedRows) -> PlannedPacks:
    shelves: list[TokenArray] = []
    for number, one in enumerate(opened):
        if isinstance(one, RowSource):
            counted = skipped if choices.skip else None
            longest = limit(choices.packer)
            shelves.append(encode_ahead(one, choices.encoder, counted, number, longest))
        else:
            shelves += filled(one, skipped, choices.encoder.vocab_size) if choices.skip else one
    packer = dict(choices.packer)
    extras = {name: packer.pop(name) for name in ("continue_positions", "pad")}
    return PlannedPacks(
        TokenStore(shelves),
        packer,
        seed=choices.seed,
        shuffle=bool(choices.shuffle),
        weights=weights,
        stop=choices.stop,
        level=choices.level,
        vocab_size=choices.encoder.vocab_size,
        packs=choices.packs,
        **extras,
    )


def _ahead(source: RowSource, choices: PipelineOptions) -> bool:
    if choices.ahead is not None:
        return choices.ahead
    return isinstance(source, Listed) or (source.size is not None and source.size <= SMALL)


def _as_rows(one: RowSource | list[TokenArray], number: int) -> RowSource:
    if isinstance(one, RowSource):
        return one
    return Shelved(one, f"tokens {number}")


class Shelved(Indexed):
    """Ready tokens as rows, for mixtures with streams."""

    def __init__(self, shelves: list[TokenArray], name: str):
        self.store, self.name = TokenStore(shelves), name

    def __len__(self) -> int:
        return len(self.store)

    def rows(self, numbers):
        return [self._row(number) for number in numbers.tolist()]

    def _row(self, number: int) -> dict:
        shelf, part = self.store.find(number)
        row = {"input_ids": shelf.flat[part]}
        return row if shelf.labels is None else row | {"labels": shelf.labels[part]}

    def fingerprint(self):
        return self.store.fingerprint()


def _window(shuffle: bool | int) -> int:
    return WINDOW if shuffle is True else int(shuffle)


def state_settings(
    packs: PlannedPacks | StreamedPacks, choices: PipelineOptions, weights: list
) -> dict:
    """Give all that shapes the sequence of packs, as JSON."""
    encoder = choices.encoder
    sharded = isinstance(packs, StreamedPacks)
    return {
        **choices.packer,
        "seed": choices.seed,
        "shuffle": _window(choices.shuffle) if sharded else bool(choices.shuffle),
        "shards": packs.settings.shards if sharded else None,
        "weights": Fingerprint(weights).text() if len(weights) > 1 else None,
        "stop": choices.stop if len(weights) > 1 else None,
        "level": choices.level,
        "column": encoder.column,
        "eos": encoder.eos,
        "on_error": "skip" if choices.skip else "raise",
        "tokenizer": tokenizer_fingerprint(encoder.tokenizer),
    }


def fingerprint_of(packs: PlannedPacks | StreamedPacks) -> str:
    """Identify the data."""
    if isinstance(packs, PlannedPacks):
        return packs.store.fingerprint()
    return Fingerprint(*(source.fingerprint() for source in packs.settings.sources)).text()
