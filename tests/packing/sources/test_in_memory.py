"""Lists, iterables, functions and iterators."""

import json
from itertools import islice

import pandas as pd
import pyarrow as pa
import pytest
from nopad.packing import PackedDataset
from torch.utils.data import DataLoader


def test_a_function_is_called_again_for_every_epoch(tools):
    rows = tools.documents(50)
    data = PackedDataset(lambda: iter(rows), budget=128, pool=4, epochs=2, shuffle=False)
    assert sum(len(pack.tokens) for pack in data) == 2 * sum(map(len, rows))


def test_an_iterator_is_read_once_and_continued_with_a_fresh_one(tools):
    rows = tools.documents(80)

    def make():
        return PackedDataset(iter(rows), budget=64, pool=8, shuffle=8)

    data = make()
    packs = iter(data)
    head = [tools.digest(pack) for pack in islice(packs, 9)]
    state = json.loads(json.dumps(data.state_dict()))
    again = make()
    again.load_state_dict(state)
    assert head + [tools.digest(p) for p in again] == [tools.digest(p) for p in make()]


def test_an_estimate_and_the_first_rows_take_nothing_from_an_iterator():
    rows = [[n + 1] * 4 for n in range(300)]
    data = PackedDataset(iter(rows), budget=4, shuffle=False, strategy="sequential")
    assert data.estimate() is None and data.first_rows() == data.first_rows() == rows[:1]
    assert [pack.tokens.tolist() for pack in data] == rows
    encoded = PackedDataset(iter(rows), budget=4, pretokenize=True)
    assert data.first_rows() == encoded.first_rows() == rows[:1], "it was read already"


def test_an_iterator_cannot_give_a_second_epoch_or_shard(tools):
    rows = tools.documents(30)
    with pytest.raises(ValueError, match="only once"):
        list(PackedDataset(iter(rows), budget=64, epochs=2))
    with pytest.raises(ValueError, match="only once"):
        list(PackedDataset(iter(rows), budget=64, shards=2))


def test_an_iterable_of_one_shard_does_not_feed_two_workers(tools):
    data = PackedDataset(lambda: iter(tools.documents(30)), budget=64)
    with pytest.raises(ValueError, match="do not divide 1 shards"):
        list(DataLoader(data, batch_size=None, num_workers=2))


@pytest.mark.parametrize("pretokenize", [True, False])
def test_a_list_is_shuffled_wholly_and_every_epoch_anew(pretokenize):
    rows = [[i, i] for i in range(100)]
    data = PackedDataset(rows, budget=2, pool=1, epochs=2, pretokenize=pretokenize, shards=1)
    order = [int(pack.tokens[0]) for pack in data]
    first, second = order[:100], order[100:]
    assert sorted(first) == sorted(second) == list(range(100)) and first != second


def test_an_empty_source_is_said_to_be_empty():
    with pytest.raises(ValueError, match="nothing to pack"):
        list(PackedDataset([], budget=8))


class Breaking:
    """A map-style dataset whose fourth row cannot be read."""

    def __len__(self):
        return 5

    def __getitem__(self, number):
        if number == 3:
            raise KeyError("boom")
        return [1, 2, number]


@pytest.mark.parametrize("pretokenize", [True, False])
def test_a_row_that_cannot_be_read_by_number_is_named_or_left_out(pretokenize):
    with pytest.raises(ValueError, match="list, row 3: KeyError: 'boom'"):
        list(PackedDataset(Breaking(), budget=8, pretokenize=pretokenize))
    data = PackedDataset(Breaking(), budget=16, pretokenize=pretokenize, shards=1, on_error="skip")
    assert sum(len(pack.tokens) for pack in data) == 12
    assert data.report()["skipped"] == {"rows": 1, "reasons": ["list, row 3: KeyError: 'boom'"]}


def test_a_dict_is_no_list_of_rows():
    with pytest.raises(ValueError, match="dict is not a source"):
        PackedDataset({"input_ids": [[1, 2]]}, budget=8)


def test_names_of_files_are_not_taken_for_documents(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    for name in (tmp_path / "a.txt", str(tmp_path / "a.txt")):
        with pytest.raises(
            ValueError, match="is a file, but the list would be read as 2 documents"
        ):
            PackedDataset([name, name], tokenizer=lambda text: [1], budget=8)


def test_a_function_that_gives_no_rows_is_told_what_to_return():
    def forgotten():
        pass

    with pytest.raises(ValueError, match="forgotten returned NoneType: a function used as a sourc"):
        list(PackedDataset(forgotten, budget=8))


def test_a_table_is_told_how_to_become_rows():
    for table in (pa.table({"input_ids": [[1, 2]]}), pd.DataFrame({"text": ["a"]})):
        with pytest.raises(ValueError, match="is a table, not a list of rows: pass datasets"):
            PackedDataset(table, budget=8)
