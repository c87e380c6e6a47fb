"""`write_shard`: read a range of a source's rows, encode it, and write it as a shard of a corpus.

    write_shard(job, number) ─▶ 00000.bin .idx .mask? and then 00000.json, its record

The files depend on the job and the number only, whatever process or machine runs it.
`encode_source` encodes in memory instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..preparation_progress import TokenProgress
from ..sample import Sample
from ..sources.corpus import FORMAT, shard_name, write_json
from ..sources.local_folder import Folder
from ..sources.source import Row, RowSource
from ..sources.token_files import MegatronWriter
from ..sources.token_store import TokenArray
from ..state.fingerprint import (
    package_version,
    template_fingerprint,
    tokenizer_fingerprint,
)
from .encoder import ENCODE_BATCH, Encoder, encode_rows, encoded_settings, raise_or_skip
from .report import SkippedRows
from .text_encoder import encode_texts, plain_text

RANGE_BYTES, MAX_RANGES = 16 << 20, 1024
"""Bytes of a range of rows; ranges of large sources have more, so that there are not too many."""
MIN_RANGES, MIN_RANGE_BYTES = 16, 1 << 20
"""Ranges of small sources have fewer bytes, so that all cores have some."""
RANGE_ROWS = 16384
"""Rows of a range if the size of the source is unknown."""
BATCH_LETTERS = 1 << 20
"""Of plain texts that are encoded together, at most ENCODE_BATCH of them."""
Report = Callable[[int], None]
"""Is called with the number of tokens that were written."""


@dataclass(frozen=True)
class Job:
    """Everything that determines the files of a corpus."""

    source: RowSource
    encoder: Encoder
    folder: Folder
    ranges: list[tuple[int, int]] | None
    """One per shard; None: the rows are read in order, RANGE_BYTES per shard."""
    skips_errors: bool = False
    max_length: int | None = None
    """A longer document raises."""

    @classmethod
    def of(cls, source: RowSource, encoder: Encoder, folder: Folder, **options: Any) -> Job:
        """Cut a source into ranges, by its size alone."""
        if source.num_bytes is not None:
            more = min(MIN_RANGES, source.num_bytes // MIN_RANGE_BYTES)
            count = max(-(-source.num_bytes // RANGE_BYTES), more)
        else:
            count = -(-(source.num_rows() or 0) // RANGE_ROWS)
        ranges = source.ranges(min(MAX_RANGES, count))
        return cls(source, encoder, folder, ranges, **options)

    @property
    def dtype(self) -> np.dtype:
        """The type of the tokens on disk, one that Megatron reads."""
        size = self.encoder.vocab_size
        return np.dtype("<u2" if size is not None and size <= 1 << 16 else "<i4")

    def header(self) -> dict:
        """Return what a continued job must have in common with the one that was interrupted."""
        encoder = self.encoder
        return {
            "format": FORMAT,
            "source": self.source.name,
            "source_fingerprint": self.source.fingerprint(),
            "tokenizer": tokenizer_fingerprint(encoder.tokenizer, template=False),
            "template": template_fingerprint(encoder.tokenizer),
            "encoded": encoded_settings(encoder),
            "vocab_size": encoder.vocab_size,
            "on_error": "skip" if self.skips_errors else "raise",
            "versions": {name: package_version(name) for name in ("nopad", "tokenizers")},
            "dtype": self.dtype.name,
            "num_ranges": None if self.ranges is None else len(self.ranges),
        }


def write_shard(
    job: Job, number: int, rows: Iterable[Row] | None = None, report: Report = lambda tokens: None
) -> dict:
    """Read, encode and write one shard; return its record.

    The files depend on the job and the number only, or on the rows if they are given.
    """
    if rows is None:
        assert job.ranges is not None
        rows = job.source.read_range(*job.ranges[number])
    before = _file_stamps(job.source)
    counts, skipped = {"documents": 0, "tokens": 0, "longest": 0}, SkippedRows()
    job.encoder.used_template = False
    with job.folder.draft() as draft:
        writer = MegatronWriter(draft / shard_name(number), job.dtype)
        for tokens, lengths, mask in _encode(job, rows, skipped if job.skips_errors else None):
            writer.add(tokens, lengths, mask)
            counts["documents"] += len(lengths)
            counts["tokens"] += len(tokens)
            counts["longest"] = max(counts["longest"], int(lengths.max(initial=0)))
            report(len(tokens))
        files = writer.close()
        if _file_stamps(job.source) != before:
            raise ValueError(changed_message(job))
    record = {
        **counts,
        "uses_template": job.encoder.used_template,
        "skipped": {"rows": skipped.rows, "reasons": skipped.reasons},
        "files": files,
    }
    write_json(job.folder, f"{shard_name(number)}.json", record)
    return record


def _encode(
    job: Job, rows: Iterable[Row], skipped: SkippedRows | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Yield tokens, lengths and label masks of batches of rows."""
    is_first = True
    for batch in _batches(job.encoder, rows):
        texts = encode_texts(job.encoder, [row.value for row in batch], is_first)
        is_first = False
        if texts is not None and int(texts[1].max()) <= (job.max_length or sys.maxsize):
            yield *texts, None
            continue
        encoded = encode_rows(batch, job.encoder, job.max_length)
        samples = list(raise_or_skip(encoded, skipped))
        if samples:
            yield _join(samples)


def _batches(encoder: Encoder, rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Cut rows into batches, so that long texts do not take more memory than short ones."""
    batch: list[Row] = []
    letters = 0
    for row in rows:
        batch.append(row)
        letters += len(plain_text(encoder, row.value) or "")
        if len(batch) == ENCODE_BATCH or letters >= BATCH_LETTERS:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch


def _join(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    tokens = np.concatenate([sample.tokens for sample in samples])
    lengths = np.array([len(sample) for sample in samples], np.int64)
    mask = np.concatenate([sample.labels for sample in samples]) == tokens
    is_default = np.count_nonzero(mask) == len(tokens) - len(samples)
    return tokens, lengths, None if is_default else mask


def _file_stamps(source: RowSource) -> list[tuple[int, int]]:
    """Return size and time of change of local files."""
    status = [path.stat() for path in source.paths if isinstance(path, Path)]
    return [(each.st_size, each.st_mtime_ns) for each in status]


def changed_message(job: Job) -> str:
    """Say that the source has changed."""
    return (
        f"{job.source.name} has changed while it was read: restore it and run the same again, "
        f"which continues, or tokenize the new content into another folder than {job.folder}"
    )


def encode_source(
    source: RowSource,
    encoder: Encoder,
    skipped: SkippedRows | None,
    number: int = 0,
    max_length: int | None = None,
) -> TokenArray:
    """Read and encode every row of a source; `number` is its index in a mixture."""
    rows, samples, tokens = source.read(0, 1), [], 0
    num_rows, num_bytes, done = source.num_rows(), source.num_bytes, 0
    size = num_bytes if num_rows is None else num_rows
    with closing(TokenProgress(f"encoding {source.name}")) as progress:
        while batch := list(islice(rows, ENCODE_BATCH)):
            encoded = list(raise_or_skip(encode_rows(batch, encoder, max_length), skipped))
            samples += encoded
            tokens += sum(map(len, encoded))
            if num_rows is None and size is not None:
                done += sum(source.row_bytes(row.value) for row in batch)
            else:
                done += len(batch)
            progress.update(tokens, None if size is None else tokens * size / done)
    return TokenArray.of(samples, source.name, number)


class ShardProgress:
    """Estimates the tokens of all shards from those that are complete."""

    def __init__(self, job: Job, records: dict[int, dict], progress: TokenProgress):
        self.job, self.records, self.progress = job, records, progress
        self.tokens_before = sum(record["tokens"] for record in records.values())

    def add(self, number: int, record: dict) -> None:
        """Count a shard that is complete."""
        self.records[number] = record

    def show(self, new_tokens: int | None = None) -> None:
        """Show the progress; new_tokens: written since the start, default: by complete shards."""
        complete = sum(record["tokens"] for record in self.records.values())
        done = max(complete - self.tokens_before, new_tokens or 0)
        total = None
        if self.job.ranges is not None and complete:
            size = sum(end - begin for begin, end in self.job.ranges)
            part = sum(self.job.ranges[n][1] - self.job.ranges[n][0] for n in self.records)
            total = round(complete * size / max(1, part)) - self.tokens_before
        self.progress.update(done, total)


def shard_tasks(
    job: Job, records: Mapping[int, dict], missing: list[int]
) -> Iterator[tuple[int, list[Row] | None]]:
    """Yield the shards to write; with their rows, if these can only be read in order."""
    if job.ranges is not None:
        yield from ((number, None) for number in missing)
        return
    for number, rows in enumerate(_rows_in_order(job)):
        if number not in records:
            yield number, rows


def _rows_in_order(job: Job) -> Iterator[list[Row]]:
    """Yield the rows of each shard of a source that can only be read in order."""
    rows: list[Row] = []
    size = 0
    for row in job.source.read(0, 1):
        rows.append(row._replace(cursor=None))
        size += job.source.row_bytes(row.value)
        if size >= RANGE_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows
