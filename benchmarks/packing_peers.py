"""The peers of bench_packing: packers and collators from PyPI (extra `bench`), and the plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import seqpacker
from nopad.packing import Pack, pack_lengths
from packing_mixes import Mix


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


def plot(all_mixes: list[Mix], path: Path) -> None:
    """Plot the fill rate over the pool size, ours and seqpacker's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pools = [2**n for n in range(5, 15)]
    plotted = [mix for mix in all_mixes if mix.name.startswith("lognormal")][:5]
    figure, axes = pyplot.subplots(1, len(plotted), figsize=(3.4 * len(plotted), 3.9), sharey=True)
    for axis, mix in zip(axes, plotted, strict=True):
        total = mix.lengths.sum() / mix.budget * 100
        ours = [total / len(pack_lengths(mix.lengths, mix.budget, pool=pool)) for pool in pools]
        buffered = [total / seqpacker_buffers(mix.lengths, mix.budget, pool) for pool in pools]
        offline = total / seqpacker_buffers(mix.lengths, mix.budget, len(mix.lengths))
        axis.semilogx(pools, ours, "o-", base=2, label="nopad, streaming")
        axis.semilogx(pools, buffered, "s--", base=2, label="seqpacker, buffers")
        axis.axhline(offline, color="grey", linestyle=":", label="best-fit decreasing, full set")
        axis.set_title(f"{mix.name}, budget {mix.budget}", fontsize=9)
        axis.set_xlabel("documents pooled")
        axis.grid(alpha=0.3)
    axes[0].set_ylim(95.9, 100.1)  # one scale for all; small buffers are below it
    axes[0].set_ylabel("fill rate, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=110)
