"""`PackedDataset`: any source to packs, as a torch IterableDataset with a small, resumable state.

    source ─▶ rows or tokens ─▶ order ─▶ packs ─▶ pack k to rank k mod world_size ─▶ its workers

The sequence of packs depends only on the data and the settings. Ranks, workers and restarts are
views of it; every rank sees the same number of packs.

    pass  ├─ epoch ─┼─ epoch ─┤├─ epoch ─┼─ epoch ─┤     `epochs` epochs, or `max_packs` packs
          start ────▶ trained ──▶ read                   the state refers to the trained packs
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal

import numpy as np
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from ..runtime import Layout, data_rank_and_size, find_layout, is_current
from .argument_checks import check_counts, check_ints
from .encoding.labelled_encoder import make_encoder
from .encoding.report import SkippedRows
from .encoding.row_format import RowFormat
from .encoding.token_cache import TokenCache
from .ordering.mixture import StoppingStrategy, parse_mixture, source_names
from .ordering.rank_share import Position, RankShare
from .pack import Pack
from .pipeline import build_packs, manifests, open_sources, state_settings
from .planning.overflow import Overflow
from .planning.planner import Strategy
from .readers.planned import PlannedPacks
from .readers.shard_reader import StreamSettings
from .settings import PackSettings
from .sources.corpus import check_tokenizer
from .sources.mapped_index import JoinedLengths
from .sources.source import TEXT_COLUMN, RowSource
from .state.progress import Progress, index_and_cursor
from .state.run_state import VERSION, check_state, is_finished
from .targets import check_unsplit


class PackedDataset(IterableDataset):
    """Packs of a source, for `DataLoader(dataset, batch_size=None)`.

    Iterating again gives the next epochs in another order. DataLoader workers are new copies and
    repeat the first order: call `set_epoch` before each pass, as trainers do. Accelerate's
    `prepare`, which a stock HF Trainer calls too, would truncate the `cu_seq_lens` of a batch:
    use `PackedTrainer`, `PackedAccelerateLoader`, `PackedDataModule` or `trainer.PackedLoader`.

    Args:
        source: a path (jsonl, parquet, text, tokens, a folder that `tokenize` wrote, a saved
            dataset), a list, an iterable, a function that returns an iterator, a datasets.Dataset,
            or a list of (source, weight).
        tokenizer: a Hugging Face tokenizer or a function from text to ids; for rows without ids.
            For rows with images, their processor: such samples are dropped or raise, never cut.
        budget: tokens that a pack may hold.
        seed: determines the order of documents and packs; a trainer's seed does not change it.
        epochs: number of epochs in one pass, or None for no end.
        max_packs: number of packs in one pass over all ranks; default: all packs of its epochs.
        rank: data-parallel rank of this process; all ranks of a tensor- or sequence-parallel group
            have the same one. Default: detected when iteration starts.
        world_size: number of data-parallel ranks; pass it together with `rank`.
        device_mesh: a mesh to read both from, with dimensions named "dp", "sp", "tp" or similar.
        max_length: longest sequence, if shorter than a pack, such as a model's 1024 positions with
            a budget of 8192; `overflow` applies to longer samples.
        shuffle: True shuffles all rows if the source has random access, otherwise blocks of 1024
            rows; a number is the size of these blocks.
        shards: number of shards of a stream with unknown lengths, 8 by default; ranks x workers
            must divide it.
        pool: samples that the packer chooses from; a larger pool fills packs better and needs more
            memory. With known lengths and shuffling, the pool is at least 65,536.
        strategy: "best_fit" for the fullest packs; "sequential" keeps the order of the data;
            "concat" also keeps it, and cuts a sample wherever a pack is full.
        overflow: what happens to a sample that is too long: "split", "truncate", "drop" or "error".
        pad_to_multiple_of: pad each sample in a pack to a multiple of this many tokens.
        pad_token_id: id of the padding of `pad_to_multiple_of`; the loss ignores it.
        continue_positions: parts of a split sample continue its positions; only with
            `attn_implementation="nopad"`.
        balance: give packs of similar cost to ranks that step together; needs known lengths.
        stopping_strategy: when a mixture's epoch ends, as in `datasets.interleave_datasets`.
        pretokenize: encode everything at the start, so that lengths are known; default: only small
            sources.
        on_error: "raise" at a row that cannot be used, or "skip" and count it.
        text_column: name of the column with the text.
        label_column: name of the column with the label of a document (a class, a score, or floats
            for several classes) or an integer for each token; for models with such a head. A
            document that is too long is not split, but raises.
        format: layout of the rows: "alpaca" (instruction, input, output), "sharegpt"
            (conversations), or a function that converts a row.
        add_eos: end texts with the tokenizer's eos (True), with this id, or not at all (False); in
            a flat token file, the id between documents.
        cache_dir: folder that caches the tokens of data encoded at the start. Default: in the cache
            of Hugging Face, for data of at least 4 MB; False: no cache.
        vocab_size: larger or equal ids are refused; default: the tokenizer's.
        glob: pattern of the files to read in a folder, such as "*.jsonl"; files of unknown suffixes
            are then read as text.
        dtype: integer type of a flat token file, "uint16" or "uint32".

    >>> data = PackedDataset([[1, 2, 3], [4, 5], [6, 7, 8]], budget=6, shuffle=False)
    >>> [pack.tokens.tolist() for pack in data], data.count()
    ([[4, 5], [1, 2, 3, 6, 7, 8]], 2)
    """

    _sender: tuple[int, int, int] | None = None
    """Process id, rank and world size of the process that sent this copy to a spawned worker."""
    _layout: Layout | None = None
    """The layout of the run: a loader's (`_is_placed`), or detected when iteration starts."""
    _is_placed = False
    _start: Progress
    """Where the pass starts, or was resumed."""
    _read: Progress
    _trained: Progress | None
    _counted: dict | None
    """The state up to which `report` counts; None: up to the packs trained, or read."""
    _worker: dict | None
    """The worker of a resumed state."""
    _finished: bool

    def __init__(
        self,
        source: Any,
        *,
        tokenizer: Any = None,
        budget: int,
        seed: int = 0,
        epochs: int | None = 1,
        max_packs: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: Any = None,
        shuffle: bool | int = True,
        shards: int | None = None,
        pool: int = 1024,
        strategy: Strategy = "best_fit",
        overflow: Overflow = "split",
        max_length: int | None = None,
        pad_to_multiple_of: int = 1,
        pad_token_id: int = 0,
        continue_positions: bool = False,
        balance: bool = False,
        stopping_strategy: StoppingStrategy = "first_exhausted",
        pretokenize: bool | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        text_column: str = TEXT_COLUMN,
        label_column: str | None = None,
        format: RowFormat | None = None,
        add_eos: bool | int = True,
        vocab_size: int | None = None,
        glob: str | None = None,
        dtype: str | None = None,
        cache_dir: str | os.PathLike | Literal[False] | None = None,
    ):
        """Open the source."""
        self.epochs, self.max_packs = check_counts(epochs=epochs, max_packs=max_packs)
        self.rank, self.world_size = _check_rank(*data_rank_and_size(rank, world_size, device_mesh))
        self.cache_dir, self.token_cache = cache_dir, TokenCache.of(cache_dir)
        self.encoder = encoder = make_encoder(
            tokenizer, label_column, text_column=text_column, format=format, add_eos=add_eos,
            vocab_size=vocab_size,
        )  # fmt: skip
        packer = check_unsplit(encoder, {
            "budget": budget, "pool": pool, "strategy": strategy, "overflow": overflow,
            "pad_to_multiple_of": pad_to_multiple_of, "max_length": max_length,
            "continue_positions": continue_positions, "pad_token_id": pad_token_id,
        })  # fmt: skip
        pairs = parse_mixture(source) or [(source, 1)]
        settings = PackSettings(
            packer=packer, vocab_size=encoder.vocab_size, weights=[weight for _, weight in pairs],
            stopping_strategy=stopping_strategy, seed=seed, shuffle=shuffle, shards=shards,
            pretokenize=pretokenize, balance=balance, max_packs=self.max_packs, on_error=on_error,
        )  # fmt: skip
        self.skipped, self.source_names = SkippedRows(), source_names(pairs)
        self._opened = opened = open_sources(pairs, encoder, glob=glob, dtype=dtype)
        self.reader = build_packs(opened, encoder, settings, self.token_cache, self.skipped)
        self.settings = state_settings(self.reader, encoder)
        if not self.reader.sequential_only:
            _ = self.fingerprint  # now: files may change before the first state
        self._start_pass(0)

    @cached_property
    def fingerprint(self) -> str:
        """Identify the data as it was opened, so that a state of other data is rejected.

        Iterables are identified at the first state: their rows are not read before they are needed.
        """
        return self.reader.fingerprint()

    @property
    def stream_settings(self) -> StreamSettings | None:
        """Sources, encoder and packer of a stream; None if lengths are known."""
        return None if isinstance(self.reader, PlannedPacks) else self.reader.settings

    def __iter__(self) -> Iterator[Pack]:
        self._detect_layout()
        self.start_next_pass()
        share, start = self._share(), self._start
        self._read = progress = Progress(start.position, dict(start.cursors))
        position = start.position
        if self._worker is not None:
            position = progress.continue_worker(self._worker, share)
        first = share.first(start.position.index)
        for pack in self.reader.read(position, share, start.position.index, start.cursors):
            progress.add(pack.index, pack.cursor)
            progress.num_packs = (pack.index - first) // share.stride + 1  # counts unused indices
            yield pack
        self._finished = True

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the current pass contains it.

        Trainers call it before every epoch, also after a resume, which it must not undo. Without
        it, DataLoader workers repeat the order of the first pass. A dataset without end ignores it
        and counts epochs itself; with workers, this needs persistent ones.
        """
        end_epoch = self._start.position.end_epoch
        if end_epoch is None or self.epochs is None:
            return
        if self._finished or not end_epoch - self.epochs <= epoch < end_epoch:
            self._start_pass(epoch)

    def rewind(self) -> None:
        """Go back to the beginning, as if nothing had been read."""
        self._start_pass(0)

    def start_next_pass(self) -> None:
        """Start the next pass if this one has ended, as iterating does.

        Call it before DataLoader workers copy the dataset.
        """
        if self._finished:
            self._start_pass(self._next_pass_epoch())

    def end_pass(self) -> dict:
        """End the pass after the packs trained so far, and return the state there.

        Only needed if workers read the packs: this process cannot see that they reached the end.
        """
        self._finished, self._read = True, self._trained or self._read
        return self.state_dict()

    def mark_trained(self, *packs: Pack | dict) -> None:
        """Mark packs as trained on: from now on the state refers to the trained packs.

        Without it, the state refers to the packs read, which includes prefetched ones. A stream's
        pack carries only the cursor of its shard, so no pack may be omitted.
        """
        if self._read is self._start:
            self.start_next_pass()  # a finished pass was loaded: the workers started the next one
        if self._trained is None:
            self._trained = Progress(self._start.position, dict(self._start.cursors))
        for pack in packs:
            index, cursor = index_and_cursor(pack)
            shards = self.settings["shards"] or 1
            self._trained.check_next(index, cursor, self._share(), shards)
            self._trained.add(index, cursor)

    def count_until(self, state: dict) -> None:
        """Let the report of a stream count the packs up to a `state` of this pass.

        Loaders call it: they mark packs as trained ahead of the training, to know their states.
        """
        self._counted = state

    def state_after(self, *packs: Pack | dict) -> dict:
        """Mark packs as trained on, and return the state after them."""
        self.mark_trained(*packs)
        return self.state_dict()

    def state_dict(self) -> dict:
        """Return the state: small JSON from which any number of ranks and workers can continue.

        The pass ends when a pack is requested after its last one, or with `end_pass`; loading the
        state of a finished pass starts the next one. If DataLoader workers read the packs, this
        process knows only the packs passed to `mark_trained`; without that call the state stays at
        the beginning, so save the state of a StatefulDataLoader instead. If lengths are unknown, a
        rank knows only its own shards: `merge_states` merges the states of all ranks.
        """
        worker = self._worker_number()
        if worker is None:
            progress = self._trained or self._read
            # Reading may be ahead of training.
            finished = self._finished and progress.last == self._read.last
            shards = progress.shard_cursors(*self.ranks())
            return self._state(progress.next_position(self._share()), shards, finished)
        state = self._state(self._start.position, self._read.shard_cursors())
        return {**state, "worker": self._read.worker_state(*worker)}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a state of the same data and settings.

        The state of a finished pass starts the next pass, unless this pass is longer: `max_packs`
        may differ and, if lengths are known, so may `epochs`, the total number of epochs in the
        pass. The pass then continues, and real packs replace the empty ones at its previous end.
        Shards of a stream that have ended do not continue, so `epochs` of a stream must not change.
        """
        check_state(state, self.settings, self.fingerprint)
        position = self.reader.resume_position(state, self.epochs)
        worker = state.get("worker")
        if worker is not None and self._worker_number() != (worker["id"], worker["num_workers"]):
            raise ValueError(
                f"the state belongs to worker {worker['id']} of {worker['num_workers']}: keep "
                "num_workers, or save the state of the trained packs, which fits any number"
            )
        cursors = {int(shard): dict(cursor) for shard, cursor in state.get("shards", {}).items()}
        self._start = Progress(position, cursors)
        self._read, self._worker = self._start, worker
        self._trained = self._counted = None
        self._finished = is_finished(state, self.epochs, self.max_packs)

    def _counted_cursors(self) -> dict[int, dict]:
        """Return the cursors of a stream's shards up to which its report counts."""
        if self._counted is None:
            return (self._trained or self._read).cursors
        shards = self._counted.get("shards", {})
        return {**self._start.cursors, **{int(shard): shards[shard] for shard in shards}}

    def _state(self, position: Position, shards: dict, finished: bool = False) -> dict:
        state = {
            "version": VERSION,
            "settings": dict(self.settings),
            "fingerprint": self.fingerprint,
            "epochs": self.epochs,
            "max_packs": self.max_packs,
            "finished": finished,
            "position": position.to_json(),
        }
        return {**state, "shards": shards} if shards else state

    def _start_pass(self, epoch: int) -> None:
        end_epoch = None if self.epochs is None else epoch + self.epochs
        position, cursors = Position(epoch, 0, 0, end_epoch), {}
        if epoch and not isinstance(self.reader, PlannedPacks):
            last = self._read if self._finished else self._trained or self._read
            cursors = self.reader.initial_cursors(position, last.cursors)
        self._start = self._read = Progress(position, cursors)
        self._trained = self._counted = self._worker = None
        self._finished = False

    def _next_pass_epoch(self) -> int:
        """Return the first epoch of the next pass."""
        if self._start.position.end_epoch is not None:
            return self._start.position.end_epoch
        # `max_packs` ended a run without end, for each reader at its own last pack: all readers
        # must agree on one epoch. If shards end in different epochs, all know only the first.
        if isinstance(self.reader, PlannedPacks) and self.max_packs is not None:
            return self.reader.next_pass_epoch(self._read.next_position(self._share()))
        return self._start.position.epoch + 1

    def __len__(self) -> int:
        """Count the packs of the current pass on this rank; TypeError if it has no known end."""
        if not isinstance(self.reader, PlannedPacks):
            raise TypeError(
                "a stream's packs cannot be counted before it was read: pass pretokenize=True, or "
                "call estimate()"
            )
        if self.epochs is None and self.max_packs is None:
            raise TypeError("with epochs=None the data has no end: pass epochs= or max_packs=")
        return -(-self._packs_of_pass() // self.ranks()[1])

    def __bool__(self) -> bool:
        return True  # without counting

    def _packs_of_pass(self) -> int:
        """Count the packs of the current pass over all ranks, from its start."""
        assert isinstance(self.reader, PlannedPacks)
        end_epoch, packs = self._start.position.end_epoch, 0
        if self.epochs is None or end_epoch is None:
            assert self.max_packs is not None
            return self.max_packs
        for epoch in range(end_epoch - self.epochs, end_epoch):
            packs += self.reader.count(epoch)
        return packs if self.max_packs is None else min(packs, self.max_packs)

    def count(self, epoch: int = 0) -> int:
        """Count the packs of this epoch over all ranks; lengths must be known."""
        return self.reader.count(epoch)

    def estimate(self) -> int | None:
        """Estimate the packs of one epoch; None for a stream of unknown size.

        If lengths are known, the result is exact. A stream is estimated from the first 256 rows of
        each source and its size in rows or bytes, which assumes that these rows are typical.
        """
        return self.reader.estimate()

    @property
    def lengths(self) -> np.ndarray | JoinedLengths | None:
        """Tokens of every document; None for a stream, whose lengths are not known in advance."""
        return self.reader.store.lengths if isinstance(self.reader, PlannedPacks) else None

    @property
    def is_labelled(self) -> bool:
        """Whether documents have targets (`targets.py`), as with `label_column`."""
        arrays = self.reader.store.arrays if isinstance(self.reader, PlannedPacks) else ()
        return "label_column" in self.settings or any(array.targets for array in arrays)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise if tokens were made with another tokenizer or chat template than the model's."""
        for manifest in manifests(self._opened):
            check_tokenizer(manifest, tokenizer)

    def first_rows(self) -> list[Any]:
        """Return the first row of each source as the encoder reads it; None for ready tokens.

        Empty for a copy of the dataset, which does not keep its sources.
        """
        firsts = [
            source.first() if isinstance(source, RowSource) else None for source in self._opened
        ]
        rows = [None if row is None else row.value for row in firsts]
        convert = self.encoder.format
        return [row if row is None or convert is None else convert(row) for row in rows]

    def report(self, epoch: int | None = None) -> dict:
        """Count packs and the samples packed, split, truncated, dropped and skipped; report shares.

        If lengths are known, the report covers all packs of an epoch, whatever `max_packs` is, by
        default the first of the current pass; `laps` is how often it reads each source. For a
        stream, it covers the packs trained by this process in this pass, also before a resume:
        the packs that a loader has issued in optimizer steps, those passed to `mark_trained` or, if
        neither is used, those read. A sample counts when its first token is packed. The reasons for
        skipped rows exclude rows that workers read; shares of changing weights cover all passes.
        """
        if isinstance(self.reader, PlannedPacks):
            epoch = self._start.position.epoch if epoch is None else epoch
            return self.reader.report(epoch, self.skipped)
        return self.reader.report(self._counted_cursors())

    def __getstate__(self) -> dict:
        # A spawned worker is not a member of its parent's process group, so it is sent the rank.
        # Any other copy may end up in a process of another rank.
        if get_spawning_popen() is None:
            return {**self.__dict__, "_opened": [], "_layout": None, "_is_placed": False}
        self._detect_layout()
        sender = os.getpid(), *self.ranks()
        # A stream's reader has the encoder and the sources.
        return {**self.__dict__, "_opened": [], "_sender": sender, "encoder": None}

    def _worker_number(self) -> tuple[int, int] | None:
        info = get_worker_info()
        return None if info is None else (info.id, info.num_workers)

    def _share(self) -> RankShare:
        return RankShare(*self.ranks(), *(self._worker_number() or (0, 1)))

    def place(self, layout: Layout) -> None:
        """Read the packs of this process in a `layout`, unless rank= is given; loaders call it."""
        self._layout, self._is_placed = layout, True

    def _detect_layout(self) -> None:
        if self.rank is None and not (self._is_placed and is_current(self._layout)):
            self._layout, self._is_placed = find_layout(), False

    def ranks(self) -> tuple[int, int]:
        """Return the data-parallel rank and size of this process, or of this worker's parent."""
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if self._layout is not None and is_current(self._layout):
                return self._layout.data_rank, self._layout.data_size
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        parent = parent_process()
        if get_worker_info() is not None and parent is not None and self._sender is not None:
            process, rank, world_size = self._sender
            if process == parent.pid:  # otherwise it was sent to the parent, which forked
                return rank, world_size
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _check_rank(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    """Return both; raise if only one of the two is given, or the rank is out of range."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank} and world_size={world_size}: pass both, or neither")
    if rank is not None and world_size is not None:
        RankShare(*check_ints(rank=rank, world_size=world_size))
    return rank, world_size
