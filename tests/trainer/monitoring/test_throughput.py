"""What is measured: rates, fill, waits, loss by source, and FLOPs as a counter of the real ones."""

from __future__ import annotations

import json

import numpy as np
import tiny_run
import torch
from nopad.collators import PackedCollator
from nopad.packing import Pack, PackedDataset, Sample
from nopad.trainer.data import PackedLoader
from nopad.trainer.data.loader import PackInfo
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring import ModelFlops, ThroughputMeter
from torch.utils.flop_counter import FlopCounterMode


def test_matrix_flops_are_those_that_run():
    model = tiny_run.model(tie_word_embeddings=True)
    batch = PackedCollator()([{"input_ids": list(range(1, 33))}])
    counter = FlopCounterMode(display=False)
    with counter:
        model(**batch).loss.backward()
    run = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert ModelFlops.from_model(model).per_token * 32 == run


def test_attention_is_counted_per_sample():
    flops = ModelFlops.from_model(tiny_run.model())
    separate, joined = flops.step_flops([16, 16]), flops.step_flops([32])
    assert joined - separate == flops.per_pair * 2 * 16 * 16
    assert flops.per_pair == 12 * 32


def test_loss_is_told_by_source():
    model = tiny_run.model()
    loss = attach_loss(model)
    samples = [Sample(np.arange(1, 9), source=0), Sample(np.arange(20, 33), source=1)]
    pack = Pack.of(samples, budget=32)
    batch = PackedCollator(pad_to_budget=True)(pack)
    model(**batch)
    meter = ThroughputMeter()
    info = PackInfo.of(pack, batch)
    meter.add(info, batch["labels"], loss.token_losses)
    rates = meter.read()
    for source, sample in enumerate(samples):
        alone = model(**PackedCollator()([sample])).loss
        assert torch.isclose(torch.tensor(rates[f"loss_source_{source}"]), alone, rtol=1e-5)


def test_tokens_and_shares_are_told_by_source():
    meter = ThroughputMeter(2, source_names=["web", "code", "rare"])
    sources = [np.array([0, 1, 0]), np.array([1])]
    for lengths, own in zip(([4, 5, 1], [10]), sources, strict=True):
        meter.reset()
        meter.add(PackInfo(0, {}, 10, np.array(lengths), 7, 7, sources=own))
    rates = meter.read()
    assert [rates[f"tokens_{name}"] for name in ("web", "code", "rare")] == [10, 30, 0]
    assert [rates[f"share_{name}"] for name in ("web", "code", "rare")] == [0, 1, 0]
    assert not any("share" in name for name in ThroughputMeter(by_source=False).read())


def test_rates_are_of_what_was_added_since_the_last_reset():
    meter = ThroughputMeter(
        2, flops=ModelFlops(10.0, 0.0, (None,)), peak=100.0, wait_seconds=lambda: 0.0
    )
    for _ in range(2):
        meter.reset()
        meter.seconds = lambda: 2.0
        meter.add(PackInfo(0, {}, 10, np.array([4, 5]), 7, 7))
    rates = meter.read()
    assert rates["tokens_per_second"] == 9.0 and rates["tokens_seen"] == 36
    assert rates["mfu"] == 9 * 10 / 2 / 100 and abs(rates["padding"] - 0.1) < 1e-9


def test_the_time_of_an_evaluation_is_in_no_rate(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("nopad.trainer.monitoring.throughput.time.perf_counter", lambda: now[0])
    meter = ThroughputMeter()
    now[0] += 2
    with meter.paused():
        now[0] += 100
        with meter.paused():  # an evaluation by generation inside the trainer's own
            now[0] += 100
    now[0] += 1
    meter.add(PackInfo(0, {}, 10, np.array([4, 5]), 7, 7))
    assert meter.read()["tokens_per_second"] == 3.0
    meter.reset()
    now[0] += 4
    assert meter.seconds() == 4


def test_a_pack_of_one_source_counts_in_the_loss_of_a_mixture(tmp_path):
    rows = ([{"input_ids": [1, 2, 3, 4]}] * 8, [{"input_ids": [5, 6, 7]}] * 8)
    file = tmp_path / "code.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[0]))
    data = PackedDataset([(str(file), 1), (rows[1], 1)], budget=4)
    model = tiny_run.model()
    loss, loader = attach_loss(model), PackedLoader(data)
    meter = ThroughputMeter.of(loader, model)
    for batch in loader:
        model(**batch)
        meter.add(loader.last_pack, batch["labels"], loss.token_losses)
        assert len(set(loader.last_pack.sources.tolist())) == 1
    rates = meter.read()
    for source, row in (("code.jsonl", rows[0][0]), ("source_1", rows[1][0])):
        alone = float(model(**PackedCollator()([row])).loss)
        assert abs(rates[f"loss_{source}"] - alone) < 1e-5
    assert rates["split"] == rates["dropped"] == 0
