"""The plot of bench_packing: fill rate over pool size."""

from __future__ import annotations

from pathlib import Path

from nopad.packing import pack_lengths
from packing_mixes import Mix
from packing_peers import seqpacker_buffers


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
