"""The loader: whole windows, exact counts, a state of what was stepped, ends that are told."""

from __future__ import annotations

import json
import random
import weakref

import numpy as np
import pytest
import tiny_run
import torch
from nopad.collators import PackedCollator
from nopad.packing import PackedDataset
from nopad.trainer.data import EvaluationLoader, PackedLoader, load_data_state, save_data_state


def ids(batch: dict) -> list:
    return batch["input_ids"].tolist()


def test_every_batch_of_a_step_carries_the_tokens_of_the_whole_step():
    loader, batches = PackedLoader(tiny_run.dataset(), accumulation_steps=4), []
    for batch in loader:
        batches.append(batch)
    assert len(batches) == 16  # 15 packs, filled up by an empty one
    for start in range(0, 16, 4):
        window = batches[start : start + 4]
        counted = sum(int((batch["labels"] != -100).sum()) for batch in window)
        assert {float(batch["num_items_in_batch"]) for batch in window} == {counted / 4}
    assert batches[-1]["labels"].tolist() == [[-100]]


def test_a_partial_window_is_dropped_if_asked():
    loader = PackedLoader(tiny_run.dataset(), accumulation_steps=4, drop_last=True)
    assert len(list(loader)) == 12


def test_data_of_less_than_a_step_is_not_dropped_in_silence():
    loader = PackedLoader(tiny_run.dataset(), accumulation_steps=16, drop_last=True)
    with pytest.raises(ValueError, match="too few packs for one optimizer step, and drop_last"):
        list(loader)
    assert list(EvaluationLoader(tiny_run.dataset(), limit=0)) == []


def test_the_report_of_a_stream_is_of_whole_steps_whatever_was_read_ahead():
    def stream() -> PackedDataset:
        rows = tiny_run.samples(20)
        return PackedDataset(lambda: iter(rows), budget=tiny_run.BUDGET, shards=2)

    loader = PackedLoader(stream(), accumulation_steps=2)
    counted = [loader.dataset.report()["packs"] for _ in loader]
    assert counted[:6] == [0, 2, 2, 4, 4, 6] and len(list(stream())) == counted[-1]
    first = PackedLoader(stream())
    for _, _ in zip(range(3), first, strict=False):
        pass
    resumed = PackedLoader(stream())
    resumed.load_state(json.loads(json.dumps(first.state())))
    assert [resumed.dataset.report()["packs"] for _ in resumed][:2] == [4, 5]


def test_the_state_is_that_of_whole_steps_whatever_was_read_ahead():
    whole = [ids(batch) for batch in PackedLoader(tiny_run.dataset(), accumulation_steps=2)]
    for stop in (1, 2, 3, 4, 7):
        loader = PackedLoader(tiny_run.dataset(), accumulation_steps=2)
        seen = [ids(batch) for _, batch in zip(range(stop), loader, strict=False)]
        state = json.loads(json.dumps(loader.state()))
        again = PackedLoader(tiny_run.dataset(), accumulation_steps=2)
        again.load_state(state)
        stepped = stop // 2 * 2
        assert seen[:stepped] + [ids(batch) for batch in again] == whole, stop


def test_an_iteration_left_early_goes_on_behind_the_last_step():
    whole = [ids(batch) for batch in PackedLoader(tiny_run.dataset(), accumulation_steps=2)]
    loader = PackedLoader(tiny_run.dataset(), accumulation_steps=2)
    first = [ids(batch) for _, batch in zip(range(4), loader, strict=False)]
    assert first + [ids(batch) for batch in loader] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_iteration_is_the_next_epoch(workers):
    loader = PackedLoader(tiny_run.dataset(), num_workers=workers)
    epochs = [[ids(batch) for batch in loader] for _ in range(2)]
    both = [ids(batch) for batch in PackedLoader(tiny_run.dataset(epochs=2))]
    assert epochs[0] + epochs[1] == both


@pytest.mark.parametrize(
    "options", [{}, {"max_packs": 2}, {"epochs": None, "max_packs": 2}], ids=str
)
def test_an_evaluation_set_is_the_same_every_time(options):
    loader = EvaluationLoader(tiny_run.dataset(23, **options))
    assert tiny_run.dataset(23).count() > 2
    first, second = list(loader), list(loader)
    assert len(loader) == len(first)
    next(iter(loader))
    assert [ids(batch) for batch in first] == [ids(batch) for batch in second]
    counted = sum(int((batch["labels"] != -100).sum()) for batch in first)
    assert float(first[0]["num_items_in_batch"]) * len(first) == counted
    assert len(list(loader)) == len(first)


@pytest.mark.parametrize("epochs", [1, 2, None])
def test_a_second_evaluation_loader_on_the_same_set_gives_the_same_batches(epochs):
    data = tiny_run.dataset(23, epochs=epochs)
    first, second, third = ([ids(batch) for batch in EvaluationLoader(data)] for _ in range(3))
    assert len(first) == data.count() and first == second == third


@pytest.mark.parametrize("epochs", [1, None])
def test_an_evaluation_holds_few_batches_at_a_time(epochs):
    made = []

    def collator(pack):
        batch = PackedCollator()(pack)
        made.append(weakref.ref(batch["input_ids"]))
        return batch

    data = tiny_run.dataset(epochs=epochs)
    alive = [sum(ref() is not None for ref in made) for _ in EvaluationLoader(data, collator)]
    assert len(alive) == data.count() == 15 and max(alive) <= 3


def test_ranks_with_uneven_shares_evaluate_the_whole_set(monkeypatch):
    whole = list(tiny_run.dataset())
    assert len(whole) % 2  # one rank gets an empty pack
    counted = float(sum(pack.num_label_tokens for pack in whole))
    samples = float(sum(len(pack.lengths) for pack in whole))
    given = []

    def sum_over_ranks(value):
        given.append(value.tolist())
        return torch.tensor([counted, samples])

    monkeypatch.setattr("nopad.trainer.data.loader.world_size", lambda: 2)
    monkeypatch.setattr("nopad.trainer.data.loader.sum_over_ranks", sum_over_ranks)
    loaders = [EvaluationLoader(tiny_run.dataset(rank=r, world_size=2)) for r in (0, 1)]
    shares = [list(loader) for loader in loaders]
    assert len(shares[0]) == len(shares[1]) == 8
    assert [sum(each) for each in zip(*given, strict=True)] == [counted, samples]
    assert [loader.samples for loader in loaders] == [samples, samples]
    found = [sum(int((batch["labels"] != -100).sum()) for batch in share) for share in shares]
    assert sum(found) == counted
    assert {float(b["num_items_in_batch"]) for share in shares for b in share} == {counted / 16}


def test_an_evaluation_of_sample_means_counts_samples():
    loader = EvaluationLoader(tiny_run.dataset(23), PackedCollator(mean="sample"))
    batches = list(loader)
    weight = sum(float(batch["loss_weights"].sum()) for batch in batches)
    assert float(batches[0]["num_items_in_batch"]) * len(batches) == pytest.approx(weight)


def test_what_became_of_long_samples_is_counted_once():
    rows = [[1] * 50, [2] * 9, [3] * 70]
    planned = PackedLoader(PackedDataset(rows, budget=32, overflow="truncate"))
    assert planned.overflow_counts() == {"split": 0, "truncated": 2, "dropped": 0, "skipped": 0}
    settings = {"budget": 32, "shards": 1, "pretokenize": False, "shuffle": False}
    for workers in (0, 1):
        data = PackedDataset(lambda: iter(rows), **settings)
        streamed = PackedLoader(data, num_workers=workers)
        told = [streamed.overflow_counts()["split"] for _ in streamed]
        assert told == sorted(told) and told[-1] == 2


@pytest.mark.parametrize("epochs", [1, None])
def test_what_became_is_that_of_the_epoch_the_data_is_in(epochs, monkeypatch):
    data = tiny_run.dataset(epochs=epochs)
    loader, asked = PackedLoader(data), []
    stock = data.reader.report

    def report(epoch, *more):
        asked.append(epoch)
        return stock(epoch, *more)

    monkeypatch.setattr(data.reader, "report", report)
    for _ in range(2 if epochs else 1):
        for _, _ in zip(range(28), loader, strict=False):
            loader.overflow_counts()
    assert asked == [0, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_no_loader_draws_from_the_random_numbers_of_the_training(workers):
    def drawn() -> tuple:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = drawn()
    assert list(PackedLoader(tiny_run.dataset(), num_workers=workers))
    assert drawn() == before
    assert list(EvaluationLoader(tiny_run.dataset(9)))
    assert drawn() == before


def test_sample_means_count_samples():
    loader = PackedLoader(tiny_run.dataset(), PackedCollator(mean="sample"))
    batch = next(iter(loader))
    assert float(batch["num_items_in_batch"]) == pytest.approx(len(loader.last_pack.lengths))


def test_the_last_pack_tells_tokens_labels_and_fill_of_the_batch():
    loader = PackedLoader(tiny_run.dataset(9), PackedCollator(mean="sample"))
    for batch in loader:
        pack = loader.last_pack
        assert pack.num_tokens == batch["input_ids"].numel()
        assert pack.num_label_tokens == int((batch["labels"] != -100).sum())
        assert pack.fill == pack.num_tokens / tiny_run.BUDGET


def test_other_data_is_refused_on_resume(tmp_path):
    save_data_state(PackedLoader(tiny_run.dataset()), tmp_path)
    with pytest.raises(ValueError, match="fingerprint"):
        load_data_state(PackedLoader(tiny_run.dataset(39)), tmp_path)
    with pytest.raises(ValueError, match=r"seed=3.*seed=4"):
        load_data_state(PackedLoader(tiny_run.dataset(seed=4)), tmp_path)
    with pytest.raises(ValueError, match=r"has no nopad_data\.json"):
        load_data_state(PackedLoader(tiny_run.dataset()), tmp_path / "elsewhere")


@pytest.mark.parametrize("make", [PackedLoader, EvaluationLoader])
def test_ranks_with_other_data_or_settings_are_told_before_the_first_step(make, monkeypatch):
    from nopad.trainer.data import loader as module

    for other, name in ((tiny_run.dataset(41), "fingerprint"), (tiny_run.dataset(seed=9), "seed")):
        theirs = {"fingerprint": other.fingerprint, **other.settings}
        monkeypatch.setattr(module, "gather_objects", lambda own, theirs=theirs: [own, own, theirs])
        message = (
            rf"differs between ranks: {name} is .* on rank 0, .* on rank 2; open the same data"
        )
        with pytest.raises(ValueError, match=message):
            next(iter(make(tiny_run.dataset())))


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_length_of_a_loader_is_the_number_of_its_batches(drop_last):
    data = tiny_run.dataset(23)
    loader = PackedLoader(data, accumulation_steps=3, drop_last=drop_last)
    assert data.count() % 3
    assert len(loader) == len(list(loader))
    assert len(EvaluationLoader(data)) == data.count()
    assert len(EvaluationLoader(data, limit=2)) == 2
    with pytest.raises(TypeError, match="the data has no end"):
        len(PackedLoader(tiny_run.dataset(epochs=None)))
