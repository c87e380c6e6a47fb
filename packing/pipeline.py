"""Open the sources of `PackedDataset`; plan packs, encoding small sources first, or stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .compiler_process import start_compiler
from .encoding.document_filter import drop_bad_documents
from .encoding.encoder import Encoder, encoded_settings
from .encoding.report import SkippedRows
from .encoding.shard_job import encode_source
from .encoding.token_cache import TokenCache
from .ordering.mixture import Weight
from .planning.overflow import max_sample_length
from .readers.planned import PlannedPacks
from .readers.shard_reader import StreamSettings
from .readers.streamed import StreamedPacks
from .settings import PackSettings
from .sources.corpus import check_tokenizer
from .sources.in_memory import ListSource, TokenRowSource
from .sources.open_source import Opened, may_be_folder, open_source
from .sources.source import SMALL_BYTES, RowSource
from .sources.token_store import TokenArray, TokenStore
from .state.fingerprint import Fingerprint


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
            as_rows=not encoder.tokens_suffice,
        )
        for number, (source, _) in enumerate(pairs)
    ]
    for manifest in manifests(opened):
        check_tokenizer(manifest, encoder.tokenizer)
    options = {"format": encoder.format_name, "label_column": encoder.label_column}
    for name, value in options.items():
        if value is not None and any(isinstance(source, list) for source in opened):
            raise ValueError(
                f"{name}={value!r} applies to rows, but this data has ready tokens: omit it"
            )
    sources = [source for source, _ in pairs]
    if glob is not None and not any(map(may_be_folder, sources)):
        raise ValueError(f"glob={glob!r} selects files in a folder, but no source is one: omit it")
    if dtype is not None and not any(isinstance(source, list) for source in opened):
        raise ValueError(f"dtype={dtype!r} is for flat .bin files, but no source is one: omit it")
    if encoder.tokenizer is None and encoder.eos_is_given and dtype is None:
        raise ValueError(
            f"add_eos={encoder.eos_token_id} applies to text, which needs tokenizer=; ready tokens "
            "are packed unchanged: append the id to each document, and omit add_eos="
        )
    return opened


def build_packs(
    opened: list[Opened],
    encoder: Encoder,
    settings: PackSettings,
    token_cache: TokenCache | None,
    skipped: SkippedRows,
) -> PlannedPacks | StreamedPacks:
    """Plan the run if every length is known or cheap to find out, otherwise stream shards."""
    if settings.packer["strategy"] == "best_fit":
        start_compiler()  # now: text is encoded meanwhile, and a trainer compiles layers
    rows = [source for source in opened if isinstance(source, RowSource)]
    if not all(_pretokenizes(source, settings) for source in rows):
        return _streamed_packs(opened, encoder, settings)
    max_length = max_sample_length(settings.packer)
    errors = skipped if settings.skips_errors else None
    arrays: list[TokenArray] = []
    for number, source in enumerate(opened):
        if isinstance(source, RowSource) and token_cache is not None and encoder.tokens_suffice:
            arrays += token_cache.encode(source, encoder, errors, number, max_length)
        elif isinstance(source, RowSource):
            arrays.append(encode_source(source, encoder, errors, number, max_length))
        elif errors is not None and not manifests([source]):
            arrays += drop_bad_documents(source, errors, encoder.vocab_size)
        else:
            arrays += source
    for manifest in manifests([arrays]):
        skipped.merge(SkippedRows(**manifest["skipped"]))
    return PlannedPacks(TokenStore(arrays), settings)


def manifests(opened: Sequence[Opened]) -> list[Mapping[str, Any]]:
    """Return the manifest of each corpus among the sources."""
    arrays = [array for source in opened if isinstance(source, list) for array in source]
    return [m for m in {id(a.manifest): a.manifest for a in arrays}.values() if m is not None]


def _streamed_packs(
    opened: list[Opened], encoder: Encoder, settings: PackSettings
) -> StreamedPacks:
    if settings.balance:
        raise ValueError("balance=True needs known lengths: pass ready tokens, or pretokenize=True")
    sources = [
        source if isinstance(source, RowSource) else TokenRowSource(source, f"tokens {number}")
        for number, source in enumerate(opened)
    ]
    shards = settings.shards or min(source.default_shards or 8 for source in sources)
    stream = {**vars(settings), "shards": shards, "sources": sources, "encoder": encoder}
    return StreamedPacks(StreamSettings(**stream))


def _pretokenizes(source: RowSource, settings: PackSettings) -> bool:
    if settings.pretokenize is not None:
        return settings.pretokenize
    size = source.num_bytes
    return isinstance(source, ListSource) or (size is not None and size <= SMALL_BYTES)


def state_settings(packs: PlannedPacks | StreamedPacks, encoder: Encoder) -> dict:
    """Return the settings that determine the sequence of packs, as JSON."""
    settings, streamed = packs.settings, isinstance(packs, StreamedPacks)
    mixed = len(settings.weights) > 1
    manifest = None if isinstance(packs, StreamedPacks) or mixed else packs.store.arrays[0].manifest
    # A state of the rows is one of the tokens that were made from them.
    encoded = encoded_settings(encoder) if manifest is None else manifest["encoded"]
    return {
        **settings.packer,
        "seed": settings.seed,
        "shuffle": settings.shuffle_block if streamed else bool(settings.shuffle),
        "shards": settings.shards if streamed else None,
        "weights": Fingerprint(settings.weights).text() if mixed else None,
        "stopping_strategy": settings.stopping_strategy if mixed else None,
        "balance": settings.balance,
        **encoded,
        "on_error": settings.on_error,
        # It decides which rows of a stream are skipped. A plan compares the documents that remain.
        "vocab_size": encoder.vocab_size if streamed and settings.skips_errors else None,
    }
