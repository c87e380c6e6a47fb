"""`tokenize`: encode a source into a corpus on disk, shard by shard, by processes or Ray tasks.

    source ─▶ ranges ─▶ write_shard(job, number) ─▶ 00000.bin .idx .mask? .json ─▶ manifest.json
              │           │ in processes here, in Ray tasks, in the tasks of a Slurm array
              └ of the source alone, so that the files do not depend on what wrote them

A job that was interrupted continues with the shards that are missing. Rows that can only be read in
order (iterables, streams, one compressed file) are read here and encoded in the processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from ..argument_checks import check_counts
from ..preparation_progress import TokenProgress, say
from ..sources.corpus import (
    JOB,
    MANIFEST,
    corpus_fingerprint,
    open_shards,
    read_json,
    shard_name,
    write_json,
)
from ..sources.in_memory import IterableSource, TokenRowSource
from ..sources.local_folder import Folder, LocalFolder, open_folder
from ..sources.open_source import open_source
from ..sources.remote import is_url
from ..sources.source import TEXT_COLUMN, Row, RowSource
from .encoder import Encoder
from .ray_tasks import run_tasks
from .report import SkippedRows
from .row_format import RowFormat
from .shard_job import (
    Job,
    Report,
    ShardProgress,
    changed_message,
    shard_tasks,
    write_shard,
)
from .text_encoder import CHECKED_BYTES, LIBRARIES, choose_encoder, plain_text

POLL_SECONDS = 0.5
SHARDS_PER_PROCESS = 16
"""Then a new process encodes: caches of the faster libraries grow over gigabytes of text."""


def tokenize(
    source: Any,
    out: str | os.PathLike,
    *,
    tokenizer: Any = None,
    text_column: str = TEXT_COLUMN,
    format: RowFormat | None = None,
    add_eos: bool | int = True,
    vocab_size: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    glob: str | None = None,
    dtype: str | None = None,
    processes: int | None = None,
    engine: Literal["local", "ray"] = "local",
    part: tuple[int, int] | None = None,
) -> dict | None:
    """Encode a source into a folder of tokens that `PackedDataset(out)` reads; return its manifest.

    A job that was interrupted continues when it is called again with the same arguments. The files
    do not depend on the number of processes, the engine or interruptions.

    Args:
        source: any source of `PackedDataset`.
        out: folder or URL to write to.
        tokenizer: a Hugging Face tokenizer or a function from text to ids; for rows without ids.
        text_column: name of the column with the text.
        format: layout of the rows: "alpaca", "sharegpt", or a function that converts a row.
        add_eos: end texts with the tokenizer's eos (True), with this id, or not at all (False); in
            a flat token file, the id between documents.
        vocab_size: larger or equal ids are refused; default: the tokenizer's.
        on_error: "raise" at a row that cannot be used, or "skip" and count it.
        glob: pattern of the files to read in a folder, such as "*.jsonl".
        dtype: integer type of a flat token file, "uint16" or "uint32".
        processes: processes that encode; default: one for each CPU core. Ray: tasks at a time.
        engine: "local" for processes of this machine, "ray" for tasks of a Ray cluster.
        part: (i, n): write only the i-th of n parts of the shards, counted from 0, and no manifest.
            Jobs of several machines write all parts; a call without `part` then completes them.
    """
    encoder = Encoder(
        tokenizer, text_column=text_column, format=format, add_eos=add_eos, vocab_size=vocab_size
    )
    if isinstance(source, str | Path) and not is_url(source) and os.path.exists(source):
        source = Path(os.path.abspath(source))  # processes of other machines start elsewhere
    opened = open_source(
        source, text_column=text_column, glob=glob, dtype=dtype, eos_token_id=encoder.eos_token_id
    )
    rows = opened if isinstance(opened, RowSource) else TokenRowSource(opened, opened[0].name)
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error {on_error!r}: choose "raise" or "skip"')
    if not os.fspath(out):
        raise ValueError("the name of the folder to write to is empty")
    if not is_url(out) and os.path.isfile(os.path.expanduser(out)):
        raise ValueError(f"{out} is a file: pass a folder to write to")
    job = Job.of(rows, encoder, open_folder(out), skips_errors=on_error == "skip")
    return run_job(job, processes=processes, engine=engine, part=part)


def run_job(
    job: Job,
    processes: int | None = None,
    engine: str = "local",
    part: tuple[int, int] | None = None,
    wait: bool = False,
) -> dict | None:
    """Write the shards that are missing, and the manifest; return it, None if a part was written.

    wait: wait for another process that writes to the folder, instead of raising.
    """
    (processes,) = check_counts(processes=processes)
    runners = {"local": run_processes, "ray": run_tasks}
    if engine not in runners:
        raise ValueError(f'engine={engine!r}: choose "local" or "ray"')
    job.folder.create()
    with job.folder.lock(shared=part is not None, wait=wait):
        header = job.header()
        records, manifest = _start(job, header)
        if manifest is not None and len(records) == len(manifest["shards"]):
            _remove_job(job.folder, records)
            _remove_drafts(job.folder, part)
            return manifest
        missing = _missing(job, records, part)
        _choose_encoder(job)
        with closing(TokenProgress(f"tokenizing {job.source.name}")) as progress:
            try:
                runners[engine](job, records, missing, processes, progress)
            except OSError as error:
                raise OSError(
                    f"{error}: {len(records)} shards of {job.folder} are complete; fix this and "
                    "run the same again, which continues"
                ) from error
        if part is not None:
            return None
        _remove_drafts(job.folder, part)
        return _finish(job, header, records)


def _remove_drafts(folder: Folder, part: tuple[int, int] | None) -> None:
    """Remove what killed processes left, unless other parts are being written."""
    if part is None and isinstance(folder, LocalFolder):
        folder.remove_drafts()


def _choose_encoder(job: Job) -> None:
    """Use a faster encoder for plain text, if it is exact on the first of it; say which."""
    encoder = job.encoder
    is_iterator = isinstance(job.source, IterableSource) and job.source.single_use
    rows = filter(None, [job.source.first()]) if is_iterator else job.source.read(0, 1)
    texts, size = [], 0
    for row in rows:
        text = plain_text(encoder, row.value)
        texts += [] if text is None else [text]
        size += len(text or "")
        if text is None or size > CHECKED_BYTES:
            break
    if texts:
        is_large = size > CHECKED_BYTES  # loading another library takes a second or two
        libraries = LIBRARIES if is_large else LIBRARIES[1:]
        encoder.text_encoder, line = choose_encoder(encoder.tokenizer, texts, libraries)
        if is_large:
            say(line)


def cpu_count() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(job: Job, header: dict) -> tuple[dict[int, dict], dict | None]:
    """Begin the job, or continue it; return the records of complete shards, and the manifest."""
    manifest = read_json(job.folder, MANIFEST)
    started = manifest or read_json(job.folder, JOB)
    records = _read_records(job.folder, manifest)
    if started is not None and (records or manifest):
        _check_same(job.folder, header, started)
    elif started != header:
        job.folder.remove(*(f"{shard_name(number)}.json" for number in records))
        write_json(job.folder, JOB, header)
        records = {}
    return records, manifest


def _check_same(folder: Folder, header: Mapping, other: Mapping, what: str = "") -> None:
    """Raise if the tokens in a folder were made from something else, naming the difference."""
    for name, value in header.items():
        found = other.get(name)
        if isinstance(value, dict) and isinstance(found, dict):
            _check_same(folder, value, found, f"{name}, ")
        elif found != value:
            raise ValueError(
                f"{folder} has other tokens ({what}{name}: {found}, here {value}): pass another "
                "folder, or restore what has changed to continue"
            )


def _read_records(folder: Folder, manifest: Mapping | None) -> dict[int, dict]:
    """Return the records of the shards whose files have the right sizes."""
    sizes = folder.sizes()
    if manifest is not None:
        records = dict(enumerate(manifest.get("shards", [])))
    else:
        stems = [name[: -len(".json")] for name in sizes if name.endswith(".json")]
        found = {int(s): read_json(folder, f"{s}.json") for s in stems if s.isdecimal()}
        records = {number: record for number, record in found.items() if record is not None}
    return {
        number: record
        for number, record in records.items()
        if all(
            sizes.get(shard_name(number) + suffix) == size
            for suffix, (size, _) in record["files"].items()
        )
    }


def _missing(job: Job, records: Mapping[int, dict], part: tuple[int, int] | None) -> list[int]:
    if job.ranges is None:
        if part is not None:
            raise ValueError(
                f"the rows of {job.source.name} can only be read in order, not in parts: omit part="
            )
        return []
    index, parts = part or (0, 1)
    if not 0 <= index < parts:
        raise ValueError(f"part {index} of {parts}: the parts of {parts} are 0 to {parts - 1}")
    return [n for n in range(index, len(job.ranges), parts) if n not in records]


def _finish(job: Job, header: dict, records: Mapping[int, dict]) -> dict:
    """Write the manifest."""
    shards = [records[number] for number in range(len(records))]
    if job.source.fingerprint() != header["source_fingerprint"]:
        raise ValueError(changed_message(job))
    skipped = SkippedRows()
    for shard in shards:
        skipped.merge(SkippedRows(**shard["skipped"]))
    manifest = {
        **header,
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "longest": max((shard["longest"] for shard in shards), default=0),
        "uses_template": any(shard["uses_template"] for shard in shards),
        "skipped": {"rows": skipped.rows, "reasons": skipped.reasons},
        "fingerprint": corpus_fingerprint(
            open_shards(job.folder, shards, job.dtype, job.source.name)
        ),
        "shards": shards,
    }
    write_json(job.folder, MANIFEST, manifest)
    _remove_job(job.folder, records)
    return manifest


def _remove_job(folder: Folder, records: Iterable[int]) -> None:
    folder.remove(JOB, *(f"{shard_name(number)}.json" for number in records))


def run_processes(
    job: Job,
    records: dict[int, dict],
    missing: list[int],
    processes: int | None,
    progress: TokenProgress,
) -> None:
    """Write shards in processes of this machine; `records` gets theirs."""
    shown, processes = ShardProgress(job, records, progress), processes or cpu_count()
    # Threads of a faster encoder would be lost in processes that are forked later.
    in_process = job.encoder.text_encoder is None or job.encoder.text_encoder.library != "fastokens"
    if in_process and job.ranges is not None and min(processes, len(missing)) <= 1:
        tokens = _Counter()
        for number in missing:
            report = tokens.report_to(shown)
            shown.add(number, write_shard(job, number, report=report))
        return
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    counter, tasks = context.Value("q", 0), shard_tasks(job, records, missing)
    # All processes are replaced together: none is forked while threads of a pool run.
    for first in tasks:
        pool = ProcessPoolExecutor(processes, context, _start_worker, (job, counter))
        some = chain([first], islice(tasks, SHARDS_PER_PROCESS * processes - 1))
        _write_in_pool(pool, some, processes, shown, counter)


def _write_in_pool(
    pool: ProcessPoolExecutor,
    tasks: Iterable[tuple[int, list[Row] | None]],
    processes: int,
    shown: ShardProgress,
    counter: Any,
) -> None:
    try:
        running: dict[Future, int] = {}
        for number, rows in tasks:
            running[pool.submit(_write_in_worker, number, rows)] = number
            while len(running) > 2 * processes:
                _collect(running, shown, counter)
        while running:
            _collect(running, shown, counter)
    except BrokenProcessPool:
        raise OSError("a process that tokenizes was killed, maybe for lack of memory") from None
    finally:
        pool.shutdown(cancel_futures=True)


class _Counter:
    def __init__(self):
        self.tokens = 0

    def report_to(self, shown: ShardProgress) -> Report:
        def report(tokens: int) -> None:
            self.tokens += tokens
            shown.show(self.tokens)

        return report


def _collect(running: dict[Future, int], shown: ShardProgress, counter: Any) -> None:
    """Wait for a shard, and take its record."""
    done, _ = wait(running, POLL_SECONDS, FIRST_COMPLETED)
    for future in sorted(done, key=running.__getitem__):
        shown.add(running.pop(future), future.result())
    shown.show(counter.value)


_worker: dict[str, Any] = {}


def _start_worker(job: Job, counter: Any) -> None:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    _worker.update(job=job, counter=counter)
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)  # the parent was killed, and nobody waits for this process


def _write_in_worker(number: int, rows: list[Row] | None) -> dict:
    counter = _worker["counter"]

    def report(tokens: int) -> None:
        with counter.get_lock():
            counter.value += tokens

    return write_shard(_worker["job"], number, rows, report)
