"""Sequential sources: a state names one position, and all rows are found again from there."""

import gzip
import json
from itertools import islice

import datasets
import numpy as np
import pytest
from nopad.packing import PackedDataset
from nopad.packing.readers.shard_reader import decompress_state

pytestmark = pytest.mark.filterwarnings("ignore")


def rows_of(count, seed):
    rng = np.random.default_rng(seed)
    return [[seed * 1000 + i] * int(n) for i, n in enumerate(rng.integers(1, 40, count))]


def table(rows):
    return datasets.Dataset.from_dict({"input_ids": rows})


def joined(join, parts):
    return join([table(rows).to_iterable_dataset() for rows in parts])


def packed_file(folder, name, rows):
    path = folder / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


PARTS = [rows_of(60, 1), rows_of(90, 2)]
SOURCES = {
    "function": lambda folder: lambda: iter(PARTS[1]),
    "compressed": lambda folder: packed_file(folder, "rows", PARTS[1]),
    "joined": lambda folder: joined(datasets.concatenate_datasets, PARTS),
    "taken in turn": lambda folder: joined(datasets.interleave_datasets, PARTS),
    "mixture": lambda folder: [
        (lambda: iter(PARTS[0]), 1),
        (joined(datasets.concatenate_datasets, PARTS), 1),
        (packed_file(folder, "rows", PARTS[1]), 2),
    ],
}


@pytest.mark.parametrize("shuffle", [False, 8])
@pytest.mark.parametrize("name", SOURCES)
def test_a_resumed_run_is_resumed_again_without_a_difference(tmp_path, tools, name, shuffle):
    source = SOURCES[name](tmp_path)

    def make():
        options = {
            "budget": 64,
            "pool": 8,
            "shards": 2,
            "epochs": 3,
            "stopping_strategy": "first_exhausted",
        }
        return PackedDataset(source, **options, shuffle=shuffle, pretokenize=False)

    data = make()
    states, whole = [json.dumps(data.state_dict())], []
    for pack in data:
        whole.append(tools.digest(pack))
        states.append(json.dumps(data.state_dict()))
    for cut in range(0, len(states) - 5, 37):
        again = make()
        again.load_state_dict(json.loads(states[cut]))
        seen = [tools.digest(pack) for pack in islice(again, 5)]
        once_more = make()
        once_more.load_state_dict(json.loads(json.dumps(again.state_dict())))
        assert seen + [tools.digest(pack) for pack in once_more] == whole[cut:]


def test_the_state_of_a_stream_joined_from_many_holds_its_state_once(tools):
    parts = [rows_of(5, seed) for seed in range(200)]
    stream = joined(datasets.concatenate_datasets, parts)
    own = len(json.dumps(stream.state_dict()))

    def make():
        return PackedDataset(stream, budget=64, pool=64, shuffle=8, shards=1)

    data, whole, states = make(), [], []
    for pack in data:
        whole.append(tools.digest(pack))
        states.append(data.state_dict())
    sizes = [len(json.dumps(decompress_state(s["shards"]["0"]["state"]))) for s in states]
    # A stream's state includes that of the rows before.
    assert own > 10_000 and max(sizes) < 2 * own + 4_000
    assert max(len(json.dumps(state)) for state in states) < 12_000
    cut = int(np.argmax(sizes))
    again = make()
    again.load_state_dict(json.loads(json.dumps(states[cut])))
    assert [tools.digest(pack) for pack in again] == whole[cut + 1 :]
