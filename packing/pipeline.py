"""Check the user's settings and build the packs: planned if lengths are known, else streamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from .encoding.encoder import Encoder, drop_bad_documents, encode_source
from .encoding.report import SkippedRows
from .encoding.token_cache import TokenCache
from .ordering.mixture import Mixture, StoppingStrategy, Weight
from .ordering.rank_shard import RankShard
from .pack import MAX_BUDGET
from .planning.overflow import max_sample_length
from .planning.packer import Packer
from .planning.planner import check_ints
from .readers.planned import PlannedPacks
from .readers.shard_reader import StreamSettings
from .readers.streamed import StreamedPacks
from .sources.in_memory import ListSource, TokenRowSource
from .sources.open_source import Opened, may_be_folder, open_source
from .sources.source import SMALL_BYTES, RowSource
from .sources.token_store import TokenArray, TokenStore
from .state.fingerprint import Fingerprint, tokenizer_fingerprint
from .token_ids import MAX_TOKEN_ID

SHUFFLE_BLOCK = 1024
"""Rows that a stream shuffles together by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The user's settings that determine the sequence of packs."""

    packer: dict[str, Any]
    encoder: Encoder
    seed: int
    shuffle: bool | int
    shards: int | None
    pretokenize: bool | None
    stopping_strategy: StoppingStrategy
    balance: bool
    max_packs: int | None
    skip_errors: bool
    token_cache: TokenCache | None = None

    @classmethod
    def checked(
        cls, *, seed: int, shards: int | None, on_error: str, **options: Any
    ) -> PipelineOptions:
        """Return the options, or raise for one that is out of range."""
        encoder, packer = options["encoder"], options["packer"]
        budget, pad_token_id = packer["budget"], packer["pad_token_id"]
        check_values(budget, pad_token_id, encoder.vocab_size, on_error, options["shuffle"])
        (seed,), (shards,) = check_ints(seed=seed), check_counts(shards=shards)
        return cls(seed=seed, shards=shards, skip_errors=on_error == "skip", **options)

    def __post_init__(self) -> None:
        """Raise for a value of the wrong type, also of settings that this source does not use."""
        flags = {"balance": self.balance, "pretokenize": self.pretokenize or False}
        flags["continue_positions"] = self.packer["continue_positions"]
        for name, value in flags.items():
            if not isinstance(value, bool | np.bool_):
                raise ValueError(f"{name}={value!r}: pass True or False")
        choices = get_args(StoppingStrategy)
        if self.stopping_strategy not in choices:
            raise ValueError(
                f"stopping_strategy={self.stopping_strategy!r}: choose {', '.join(choices)}"
            )
        if self.packer["pool"] < 1:
            raise ValueError(f"pool {self.packer['pool']}: at least one segment")


def packer_settings(*, max_length: int | None, **settings: Any) -> dict[str, Any]:
    """Return the settings of a packer, numbers as Python's integers."""
    names = ("budget", "pool", "pad_to_multiple_of", "pad_token_id")
    numbers = check_ints(**{name: settings[name] for name in names})
    (max_length,) = check_counts(max_length=max_length)
    return {**settings, **dict(zip(names, numbers, strict=True)), "max_length": max_length}


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
    opened: list[Opened], weights: list[Weight], options: PipelineOptions, skipped: SkippedRows
) -> PlannedPacks | StreamedPacks:
    """Plan the run if every length is known or cheap to find out, otherwise stream shards."""
    # Invalid settings raise now, not when iteration starts, perhaps in a worker.
    Packer(**options.packer)
    Mixture(weights, options.stopping_strategy)
    streamed = any(
        isinstance(source, RowSource) and not _pretokenizes(source, options) for source in opened
    )
    if not streamed:
        return _planned_packs(opened, weights, options, skipped)
    if options.balance:
        raise ValueError("balance=True needs known lengths: pass ready tokens, or pretokenize=True")
    sources = [_as_row_source(source, number) for number, source in enumerate(opened)]
    shards = options.shards
    if shards is None:
        shards = min(source.default_shards or 8 for source in sources)
    settings = StreamSettings(
        sources=sources,
        weights=weights,
        stopping_strategy=options.stopping_strategy,
        encoder=options.encoder,
        packer=options.packer,
        shards=shards,
        seed=options.seed,
        shuffle_block=_shuffle_block(options.shuffle),
        skip_errors=options.skip_errors,
    )
    return StreamedPacks(settings, options.max_packs)


def _planned_packs(
    opened: list[Opened], weights: list[Weight], options: PipelineOptions, skipped: SkippedRows
) -> PlannedPacks:
    encoder, max_length = options.encoder, max_sample_length(options.packer)
    arrays: list[TokenArray] = []
    for number, source in enumerate(opened):
        if isinstance(source, RowSource):
            errors = skipped if options.skip_errors else None
            encode = encode_source if options.token_cache is None else options.token_cache.encode
            arrays.append(encode(source, encoder, errors, number, max_length))
        elif options.skip_errors:
            arrays += drop_bad_documents(source, skipped, encoder.vocab_size)
        else:
            arrays += source
    planner = dict(options.packer)
    extras = {name: planner.pop(name) for name in ("continue_positions", "pad_token_id")}
    return PlannedPacks(
        TokenStore(arrays),
        planner,
        seed=options.seed,
        shuffle=bool(options.shuffle),
        weights=weights,
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


def _as_row_source(source: Opened, number: int) -> RowSource:
    if isinstance(source, RowSource):
        return source
    return TokenRowSource(source, f"tokens {number}")


def _shuffle_block(shuffle: bool | int) -> int:
    return SHUFFLE_BLOCK if shuffle is True else int(shuffle)


def state_settings(
    packs: PlannedPacks | StreamedPacks, options: PipelineOptions, weights: list[Weight]
) -> dict:
    """Return the settings that determine the sequence of packs, as JSON."""
    encoder = options.encoder
    streamed, mixed = isinstance(packs, StreamedPacks), len(weights) > 1
    return {
        **options.packer,
        "seed": options.seed,
        "shuffle": _shuffle_block(options.shuffle) if streamed else bool(options.shuffle),
        "shards": packs.settings.shards if streamed else None,
        "weights": Fingerprint(weights).text() if mixed else None,
        "stopping_strategy": options.stopping_strategy if mixed else None,
        "balance": options.balance,
        "text_column": encoder.text_column,
        "format": encoder.format_name,
        "add_eos": encoder.eos_token_id,
        "on_error": "skip" if options.skip_errors else "raise",
        "tokenizer": tokenizer_fingerprint(encoder.tokenizer),
        # It decides which rows of a stream are skipped; of known lengths, those left are compared.
        "vocab_size": encoder.vocab_size if streamed and options.skip_errors else None,
    }


def data_fingerprint(packs: PlannedPacks | StreamedPacks) -> str:
    """Identify the data of all sources."""
    if isinstance(packs, PlannedPacks):
        return packs.store.fingerprint()
    return Fingerprint(*(source.fingerprint() for source in packs.settings.sources)).text()


def is_sequential(packs: PlannedPacks | StreamedPacks) -> bool:
    """Return whether rows can only be read in their order, from an iterable of the user's."""
    if isinstance(packs, PlannedPacks):
        return False
    return any(source.sequential_only for source in packs.settings.sources)


def check_counts(**settings: int | None) -> list[int | None]:
    """Return settings that are None or at least 1."""
    for name, value in settings.items():
        if value is not None and check_ints(**{name: value})[0] < 1:
            raise ValueError(
                f"{name} {value}: at least 1, or None{' for no end' * (name == 'epochs')}"
            )
    return [None if value is None else int(value) for value in settings.values()]


def check_rank(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    """Return both; raise if only one of the two is given, or the rank is none of the ranks."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank {rank} and world_size {world_size}: pass both, or neither")
    if rank is not None and world_size is not None:
        RankShard(*check_ints(rank=rank, world_size=world_size))
    return rank, world_size


def check_values(
    budget: int, pad_token_id: int, vocab_size: int | None, on_error: str, shuffle: bool | int
) -> None:
    """Raise on settings out of range."""
    if budget < 2:
        raise ValueError(f"budget {budget}: a pack needs at least 2 tokens to learn from")
    if budget > MAX_BUDGET:
        raise ValueError(f"budget {budget}: a pack has at most {MAX_BUDGET} tokens")
    largest = MAX_TOKEN_ID if vocab_size is None else vocab_size - 1
    if not 0 <= pad_token_id <= largest:
        ids = f"from 0 to {largest}"
        raise ValueError(f"pad_token_id={pad_token_id}: pad with an id of the vocabulary, {ids}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error {on_error!r}: choose "raise" or "skip"')
    if not isinstance(shuffle, int | np.integer) or shuffle < 0:
        raise ValueError(f"shuffle={shuffle!r}: True, False, or how many rows to shuffle together")
