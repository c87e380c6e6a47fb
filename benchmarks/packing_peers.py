"""The peers of bench_packing: packers and collators from PyPI (extra `bench`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import seqpacker
from nopad.packing import Pack


def seqpacker_buffers(lengths: np.ndarray, budget: int, buffer: int) -> int:
    """Pack one buffer of documents after another with seqpacker; return the number of packs."""
    packer = seqpacker.Packer(capacity=budget, strategy="obfd")
    packs = 0
    for start in range(0, len(lengths), buffer):
        packs += len(packer.pack_flat(lengths[start : start + buffer])[1]) + 1
    return packs


def arrow_rows(flat: np.ndarray, lengths: np.ndarray) -> Any:
    """Return documents as the rows of a `datasets.Dataset`."""
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    datasets.disable_caching()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(np.int32)))
    return datasets.Dataset(pa.table({"input_ids": rows}))


def read_rows(rows: Any) -> int:
    """Read a `datasets.Dataset` as numpy, 1000 rows at a time; return the number of tokens."""
    batches = rows.with_format("numpy").iter(1000)
    return sum(len(row) for batch in batches for row in batch["input_ids"])


def trl_packs(flat: np.ndarray, lengths: np.ndarray, budget: int) -> int:
    """Pack an Arrow dataset with TRL's pack_dataset, by default settings; return the count."""
    from trl import pack_dataset

    return len(pack_dataset(arrow_rows(flat, lengths), budget, "bfd"))


def grain_packs(flat: np.ndarray, lengths: np.ndarray, budget: int) -> int:
    """Pack arrays with Grain's BestFit, 1024 bins, in this thread; return the number of packs."""
    import grain
    from grain.experimental import BestFitPackIterDataset

    documents = np.split(flat.astype(np.int32), np.cumsum(lengths)[:-1])
    source = grain.MapDataset.source([{"input_ids": ids} for ids in documents])
    one_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    packed = BestFitPackIterDataset(
        source.to_iter_dataset(one_thread),
        length_struct={"input_ids": budget},
        num_packing_bins=1024,
        shuffle_bins=False,
    )
    return sum(1 for _ in packed)


def flatten_packs(packs: Iterator[Pack], count: int) -> None:
    """Collate the documents of packs with Transformers' flattening collator."""
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=False)
    for _ in range(count):
        pack = next(packs)
        documents = np.split(pack.tokens, pack.cu_seqlens[1:-1])
        collate([{"input_ids": ids.tolist()} for ids in documents])
