"""Open the sources and choose the reader: planned if lengths are known, streamed otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .argument_checks import check_counts, check_flags, check_ints
from .encoding.document_filter import drop_bad_documents
from .encoding.encoder import Encoder, encode_source
from .encoding.report import SkippedRows
from .encoding.token_cache import TokenCache
from .ordering.mixture import StoppingStrategy, Weight, check_stopping_strategy
from .planning.planner import max_sample_length
from .readers.planned import PlannedPacks
from .readers.shard_reader import StreamSettings
from .readers.streamed import StreamedPacks
from .sources.in_memory import ListSource, TokenRowSource
from .sources.open_source import Opened, may_be_folder, open_source
from .sources.source import SMALL_BYTES, RowSource
from .sources.token_store import TokenArray, TokenStore
from .state.fingerprint import Fingerprint, tokenizer_fingerprint

SHUFFLE_BLOCK = 1024
"""Rows that a stream shuffles together by default."""


@dataclass(slots=True, kw_only=True)
class PipelineOptions:
    """The user's settings that determine the sequence of packs."""

    packer: dict[str, Any]
    encoder: Encoder
    weights: list[Weight]
    stopping_strategy: StoppingStrategy
    seed: int
    shuffle: bool | int
    shards: int | None
    pretokenize: bool | None
    balance: bool
    max_packs: int | None
    on_error: Literal["raise", "skip"]
    token_cache: TokenCache | None

    def __post_init__(self) -> None:
        """Raise for a value that is out of range, also if this source does not use it."""
        (self.seed,), (self.shards,) = check_ints(seed=self.seed), check_counts(shards=self.shards)
        check_stopping_strategy(self.stopping_strategy)
        check_flags(balance=self.balance, pretokenize=self.pretokenize or False)
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f'on_error {self.on_error!r}: choose "raise" or "skip"')
        if not isinstance(self.shuffle, int | np.integer) or self.shuffle < 0:
            raise ValueError(
                f"shuffle={self.shuffle!r}: True, False, or how many rows to shuffle together"
            )

    @property
    def shuffle_block(self) -> int:
        """Rows that a stream shuffles together."""
        return SHUFFLE_BLOCK if self.shuffle is True else int(self.shuffle)


def open_sources(
    pairs: list[tuple[Any, Weight]], encoder: Encoder, *, glob: str | None, dtype: str | None
) -> list[Opened]:
    """Open the sources of a mixture, in order; raise for an option that none of them uses."""
    opened = [
        open_source(
            source,
            text_column=encoder.text_column,
            eos_token_id=encoder.eos_token_id,
            number=number,
            glob=glob,
            dtype=dtype,
        )
        for number, (source, _) in enumerate(pairs)
    ]
    if encoder.format is not None and any(isinstance(source, list) for source in opened):
        raise ValueError(
            f"format={encoder.format_name!r} converts rows, and this data has ready tokens: omit it"
        )
    sources = [source for source, _ in pairs]
    if glob is not None and not any(map(may_be_folder, sources)):
        raise ValueError(f"glob={glob!r} chooses files of a folder, and no source is one: omit it")
    if dtype is not None and not any(isinstance(source, list) for source in opened):
        raise ValueError(f"dtype={dtype!r} is of flat .bin files, and no source is one: omit it")
    if encoder.tokenizer is None and encoder.eos_is_given and dtype is None:
        raise ValueError(
            f"add_eos={encoder.eos_token_id} ends documents of text, which need tokenizer=; ready "
            "tokens are packed as they are: append it to their ids, and omit add_eos="
        )
    return opened


def build_packs(
    opened: list[Opened], options: PipelineOptions, skipped: SkippedRows
) -> PlannedPacks | StreamedPacks:
    """Plan the run if every length is known or cheap to find out, otherwise stream shards."""
    rows = [source for source in opened if isinstance(source, RowSource)]
    if all(_pretokenizes(source, options) for source in rows):
        return _planned_packs(opened, options, skipped)
    if options.balance:
        raise ValueError("balance=True needs known lengths: pass ready tokens, or pretokenize=True")
    sources = [
        source if isinstance(source, RowSource) else TokenRowSource(source, f"tokens {number}")
        for number, source in enumerate(opened)
    ]
    settings = StreamSettings(
        sources=sources,
        weights=options.weights,
        stopping_strategy=options.stopping_strategy,
        encoder=options.encoder,
        packer=options.packer,
        shards=options.shards or min(source.default_shards or 8 for source in sources),
        seed=options.seed,
        shuffle_block=options.shuffle_block,
        skip_errors=options.on_error == "skip",
    )
    return StreamedPacks(settings, options.max_packs)


def _planned_packs(
    opened: list[Opened], options: PipelineOptions, skipped: SkippedRows
) -> PlannedPacks:
    encoder, max_length = options.encoder, max_sample_length(options.packer)
    errors = skipped if options.on_error == "skip" else None
    encode = encode_source if options.token_cache is None else options.token_cache.encode
    arrays: list[TokenArray] = []
    for number, source in enumerate(opened):
        if isinstance(source, RowSource):
            arrays.append(encode(source, encoder, errors, number, max_length))
        elif errors is not None:
            arrays += drop_bad_documents(source, errors, encoder.vocab_size)
        else:
            arrays += source
    planner = dict(options.packer)
    extras = {name: planner.pop(name) for name in ("continue_positions", "pad_token_id")}
    return PlannedPacks(
        TokenStore(arrays),
        planner,
        seed=options.seed,
        shuffle=bool(options.shuffle),
        weights=options.weights,
        stopping_strategy=options.stopping_strategy,
        balance=options.balance,
        vocab_size=encoder.vocab_size,
        max_packs=options.max_packs,
        **extras,
    )


def _pretokenizes(source: RowSource, options: PipelineOptions) -> bool:
    if options.pretokenize is not None:
        return options.pretokenize
    if isinstance(source, ListSource):
        return True
    return source.num_bytes is not None and source.num_bytes <= SMALL_BYTES


def state_settings(packs: PlannedPacks | StreamedPacks, options: PipelineOptions) -> dict:
    """Return the settings that determine the sequence of packs, as JSON."""
    encoder, skips = options.encoder, options.on_error == "skip"
    streamed, mixed = isinstance(packs, StreamedPacks), len(options.weights) > 1
    return {
        **options.packer,
        "seed": options.seed,
        "shuffle": options.shuffle_block if streamed else bool(options.shuffle),
        "shards": packs.settings.shards if streamed else None,
        "weights": Fingerprint(options.weights).text() if mixed else None,
        "stopping_strategy": options.stopping_strategy if mixed else None,
        "balance": options.balance,
        "text_column": encoder.text_column,
        "format": encoder.format_name,
        "add_eos": encoder.eos_token_id,
        "on_error": options.on_error,
        "tokenizer": tokenizer_fingerprint(encoder.tokenizer),
        # It decides which rows of a stream are skipped. A plan compares the documents that remain.
        "vocab_size": encoder.vocab_size if streamed and skips else None,
    }
