"""Hugging Face datasets: ready tokens, rows, streams, saved folders."""

import json

import datasets
import numpy as np
import pytest
from char_tokenizer import tokenize_chars
from nopad.packing import PackedDataset
from nopad.packing.readers import PlannedPacks
from nopad.packing.sources import open_source
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def rows(tools):
    return [row.tolist() for row in tools.documents(200)]


def parts(packs):
    return sorted(
        p.tolist() for pack in packs for p in np.split(pack.tokens, pack.cu_seqlens[1:-1])
    )


def test_ready_tokens_are_read_from_arrow_memory(rows):
    data = datasets.Dataset.from_dict({"input_ids": rows})
    packed = PackedDataset(data, budget=128, pool=16)
    assert isinstance(packed.reader, PlannedPacks)
    assert parts(packed) == sorted(rows)


@pytest.mark.parametrize("change", ["shuffle", "select", "concatenate", "slice"])
def test_rearranged_datasets_are_read_in_their_own_order(rows, change):
    data = datasets.Dataset.from_dict({"input_ids": rows})
    data = {
        "shuffle": lambda: data.shuffle(seed=1),
        "select": lambda: data.select([5, 3, 3, 77]),
        "concatenate": lambda: datasets.concatenate_datasets([data, data.select(range(9))]),
        "slice": lambda: data.select(range(20, 90)),
    }[change]()
    packed = PackedDataset(data, budget=128, shuffle=False, strategy="concat")
    flat = np.concatenate([pack.tokens for pack in packed]).tolist()
    assert flat == [token for row in data["input_ids"] for token in row]


def test_labels_come_along(rows):
    labels = [[-100 if i % 2 else token for i, token in enumerate(row)] for row in rows]
    data = datasets.Dataset.from_dict({"input_ids": rows, "labels": labels})
    packed = PackedDataset(data, budget=128, shuffle=False, strategy="sequential")
    found = np.concatenate([pack.labels for pack in packed]).tolist()
    assert found == [x for own in labels for x in [-100, *own[1:]]]


def test_labels_of_another_length_are_named(rows):
    labels = [list(row) for row in rows]
    labels[7].append(1)
    data = datasets.Dataset.from_dict({"input_ids": rows, "labels": labels})
    with pytest.raises(ValueError, match="row 7"):
        PackedDataset(data, budget=128)


@pytest.mark.parametrize("values", [[[1.5]], [["a"]], [[1, None]], [None]])
def test_tokens_that_are_none_are_refused(values):
    data = datasets.Dataset.from_dict({"input_ids": values})
    with pytest.raises(ValueError, match=r"integers|nulls|lists"):
        PackedDataset(data, budget=8)


@pytest.mark.parametrize("pretokenize", [True, False])
def test_text_rows_are_encoded(pretokenize):
    data = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(50)]})
    packed = PackedDataset(
        data, tokenizer=tokenize_chars, add_eos=0, budget=64, pretokenize=pretokenize, shards=2
    )
    assert parts(packed) == sorted([*tokenize_chars(f"row {i}"), 0] for i in range(50))


def test_a_saved_folder_is_opened(tmp_path, rows):
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "saved")
    assert parts(PackedDataset(tmp_path / "saved", budget=128)) == sorted(rows)


def test_a_saved_folder_that_points_outside_is_refused(tmp_path, rows):
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "saved")
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    state["_data_files"][0]["filename"] = "../../etc/passwd"
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="leads out of its folder"):
        PackedDataset(tmp_path / "saved", budget=128)


def test_a_dataset_of_splits_asks_for_one(rows):
    data = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": rows})})
    with pytest.raises(ValueError, match=r"splits \['train'\]"):
        PackedDataset(data, budget=128)


@pytest.fixture(params=[1, 8])
def stream(request, rows):
    data = datasets.Dataset.from_dict({"input_ids": rows})
    return data.to_iterable_dataset(num_shards=request.param)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_streaming_dataset_is_read_whole_by_any_number_of_workers(stream, rows, workers):
    packed = PackedDataset(stream, budget=128, pool=8, shards=4, shuffle=8)
    loader = DataLoader(packed, batch_size=None, num_workers=workers)
    packs = [pack for pack in loader if len(pack.tokens)]
    assert parts(packs) == sorted(rows)


def test_a_streaming_dataset_resumes_exactly_shuffled(stream, tools):
    def make():
        return PackedDataset(stream, budget=128, pool=8, shards=4, shuffle=8, epochs=2)

    data = make()
    states, digests = [json.dumps(data.state_dict())], []
    for pack in data:
        digests.append(tools.digest(pack))
        states.append(json.dumps(data.state_dict()))
    for cut in range(0, len(states), 5):
        again = make()
        again.load_state_dict(json.loads(states[cut]))
        assert [tools.digest(pack) for pack in again] == digests[cut:]


def test_a_stream_shuffled_through_a_buffer_is_refused(stream):
    with pytest.raises(ValueError, match="unshuffled"):
        open_source(stream.shuffle(buffer_size=10))


@pytest.mark.parametrize("join", [datasets.concatenate_datasets, datasets.interleave_datasets])
def test_a_buffer_inside_a_joined_stream_is_refused_too(stream, join):
    joined = join([stream, stream.shuffle(seed=1, buffer_size=10)])
    with pytest.raises(ValueError, match="unshuffled"):
        open_source(joined.map(dict))


def test_a_name_on_the_hub_is_streamed_and_a_missing_one_is_told(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = []

    def load_dataset(name, **options):
        asked.append((name, options))
        if name == "nobody/nothing":
            raise FileNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub\nor so")
        return datasets.Dataset.from_dict({"text": ["ab", "cde"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = PackedDataset(
        "owner/name-v1.1", tokenizer=tokenize_chars, budget=8, shuffle=False, add_eos=False
    )
    assert [row for row in parts(data) if row] == [tokenize_chars("ab"), tokenize_chars("cde")]
    assert asked == [("owner/name-v1.1", {"split": "train", "streaming": True})]
    with pytest.raises(ValueError, match="nobody/nothing is not a file or folder here, nor on the"):
        PackedDataset("nobody/nothing", tokenizer=tokenize_chars, budget=8)
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        PackedDataset("data/corpus.jsonl", tokenizer=tokenize_chars, budget=8)
    assert len(asked) == 2


def test_lists_of_one_length_are_read_from_arrow_memory_too(tmp_path):
    kind = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"), length=3)})
    data = datasets.Dataset.from_dict({"input_ids": [[i, i, i] for i in range(9)]}, kind)
    chosen = data.select(range(2, 6))
    packs = PackedDataset(chosen, budget=12, shuffle=False, strategy="sequential")
    assert next(iter(packs)).tokens.tolist() == [2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]


def test_a_saved_folder_of_splits_asks_for_one(tmp_path, rows):
    data = datasets.Dataset.from_dict({"input_ids": rows})
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"splits \['test', 'train'\]: pass the folder of one"):
        PackedDataset(tmp_path / "both", budget=64)
    assert PackedDataset(tmp_path / "both" / "train", budget=64).count()


def test_masks_that_would_be_passed_over_are_refused(rows):
    ones = [[1] * len(row) for row in rows]
    data = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": ones})
    assert PackedDataset(data, budget=256).count()
    padded = datasets.Dataset.from_dict(
        {"input_ids": [[*row, 0] for row in rows], "attention_mask": [[*one, 0] for one in ones]}
    )
    with pytest.raises(ValueError, match="dataset: attention_mask contains 0"):
        PackedDataset(padded, budget=256)
    answers = datasets.Dataset.from_dict({"input_ids": rows, "completion_mask": ones})
    with pytest.raises(ValueError, match="dataset: completion_mask without labels"):
        PackedDataset(answers, budget=256)


def test_a_mask_beside_labels_must_agree_with_them(rows):
    masks = [[0] + [1] * (len(row) - 1) for row in rows]
    labels = [[-100, *row[1:]] for row in rows]
    columns = {"input_ids": rows, "labels": labels, "loss_mask": masks}
    assert parts(PackedDataset(datasets.Dataset.from_dict(columns), budget=256)) == sorted(rows)
    labels[150][0] = rows[150][0]
    with pytest.raises(ValueError, match="dataset: a token that loss_mask excludes has a label"):
        PackedDataset(datasets.Dataset.from_dict(columns), budget=256)


def test_shifted_labels_of_ready_tokens_are_named_or_left_out_and_counted():
    rows = {"input_ids": [[1, 2], [3, 4, 5], [6, 7]], "labels": [[1, 2], [4, 5, -100], [-100, 7]]}
    data, order = datasets.Dataset.from_dict(rows), {"shuffle": False, "strategy": "sequential"}
    with pytest.raises(ValueError, match="dataset, document 1: the label of token 0 is 4"):
        list(PackedDataset(data, budget=8, **order))
    packs = PackedDataset(data, budget=8, on_error="skip", **order)
    assert [pack.tokens.tolist() for pack in packs] == [[1, 2, 6, 7]]
    reasons = ["dataset, document 1: a label is not its own token"]
    assert packs.report()["skipped"] == {"rows": 1, "reasons": reasons}


@pytest.mark.parametrize("mask", [1, None, "whole"])
def test_a_mask_that_is_no_list_says_nothing_of_padding(rows, mask):
    data = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": [mask] * len(rows)})
    assert parts(PackedDataset(data, budget=256)) == sorted(rows)


def test_empty_rows_of_ready_tokens_are_named_or_left_out_and_counted():
    parts = [{"input_ids": [[1, 2], [3]]}, {"input_ids": [[4], [], [5, 6]]}]
    data = datasets.concatenate_datasets([datasets.Dataset.from_dict(part) for part in parts])
    with pytest.raises(ValueError, match="document 3 is empty or has nulls: pass on_error"):
        PackedDataset(data, budget=8)
    options = {"budget": 8, "shuffle": False, "strategy": "sequential", "on_error": "skip"}
    packs = PackedDataset(data, **options)
    assert [pack.tolist() for pack in (p.tokens for p in packs)] == [[1, 2, 3, 4, 5, 6]]
    left_out = packs.report()["skipped"]
    assert left_out["rows"] == 1 and "dataset, document 3: it is empty or" in left_out["reasons"][0]


@pytest.mark.parametrize("column", ["input_ids", "labels"])
@pytest.mark.parametrize("bad", [99, -7])
def test_ready_tokens_outside_the_vocabulary_are_named_or_counted(column, bad):
    rows = {"input_ids": [[1, 2], [3, 4], [5, 6]], "labels": [[1, 2], [-100, 4], [-100, -100]]}
    rows[column][1][1] = bad
    data = datasets.Dataset.from_dict(rows)
    options = {"budget": 8, "vocab_size": 10, "shuffle": False, "strategy": "sequential"}
    with pytest.raises(ValueError, match=rf"document 1 contains the \w+ {bad}: .*on_error"):
        list(PackedDataset(data, **options))
    packs = PackedDataset(data, **options, on_error="skip")
    assert [pack.tokens.tolist() for pack in packs] == [[1, 2, 5, 6]]
    assert packs.report()["skipped"] == {
        "rows": 1,
        "reasons": ["dataset, document 1: an id is outside the vocabulary"],
    }


@pytest.mark.parametrize("length", [-1, 2])
@pytest.mark.parametrize("null", [None, [3, None]])
@pytest.mark.parametrize("labelled", [False, True])
def test_rows_with_nulls_are_named_or_left_out_and_counted(null, length, labelled):
    ids = datasets.List(datasets.Value("int32"), length=length)
    rows = {"input_ids": [[9, 9], [1, 2], null, [5, 6]]}
    if labelled:
        rows["labels"] = [[-100, -100], [-100, 2], null, [5, -100]]
    kinds = datasets.Features(dict.fromkeys(rows, ids))
    data = datasets.Dataset.from_dict(rows, kinds).select(range(1, 4))
    with pytest.raises(
        ValueError, match="dataset, document 1 is empty or has nulls: pass on_error"
    ):
        PackedDataset(data, budget=8)
    options = {"budget": 8, "shuffle": False, "strategy": "sequential", "on_error": "skip"}
    packs = PackedDataset(data, **options)
    (pack,) = packs
    assert pack.tokens.tolist() == [1, 2, 5, 6] and packs.report()["skipped"]["rows"] == 1
    assert pack.labels.tolist() == [-100, 2, -100, -100 if labelled else 6]


@pytest.mark.parametrize("pretokenize", [True, False])
def test_what_a_transform_makes_of_rows_is_what_is_packed(pretokenize):
    data = datasets.Dataset.from_dict({"text": [f"ROW {i}" for i in range(50)]})
    low = data.with_transform(lambda some: {"text": [text.lower() for text in some["text"]]})
    options = {
        "tokenizer": tokenize_chars,
        "add_eos": 0,
        "budget": 64,
        "pretokenize": pretokenize,
        "shards": 2,
    }
    assert parts(PackedDataset(low, **options)) == sorted(
        [*tokenize_chars(f"row {i}"), 0] for i in range(50)
    )
    ids = data.with_transform(
        lambda some: {"input_ids": [tokenize_chars(text) for text in some["text"]]}
    )
    assert parts(PackedDataset(ids, budget=64)) == sorted(
        tokenize_chars(f"ROW {i}") for i in range(50)
    )


def test_a_transform_of_ready_tokens_is_not_passed_over(rows):
    data = datasets.Dataset.from_dict({"input_ids": rows})
    data.set_transform(lambda some: {"input_ids": [[7] * len(row) for row in some["input_ids"]]})
    assert parts(PackedDataset(data, budget=128)) == sorted([7] * len(row) for row in rows)


def test_a_row_that_its_transform_raises_on_is_named_or_left_out():
    def halved(some):
        return {"input_ids": [[12 // n] for n in some["n"]]}

    data = datasets.Dataset.from_dict({"n": [1, 2, 0, 3]}).with_transform(halved)
    with pytest.raises(ValueError, match="dataset, row 2: ZeroDivisionError"):
        PackedDataset(data, budget=8)
    packed = PackedDataset(data, budget=8, on_error="skip")
    assert parts(packed) == [[4], [6], [12]] and packed.report()["skipped"]["rows"] == 1


@pytest.mark.parametrize("kind", ["torch", "numpy", None])
def test_columns_that_a_format_leaves_out_are_left_out(rows, kind):
    labels = [[-100] * len(row) for row in rows]
    data = datasets.Dataset.from_dict({"input_ids": rows, "labels": labels})
    data = data.with_format(kind, columns=["input_ids"])
    assert any((pack.labels != -100).any() for pack in PackedDataset(data, budget=128))
    data = data.with_format(kind, columns=["input_ids"], output_all_columns=True)
    assert all((pack.labels == -100).all() for pack in PackedDataset(data, budget=128))


@pytest.mark.parametrize("way", ["add_column", "axis 1"])
def test_a_labels_column_may_be_cut_at_other_rows_than_the_ids(rows, way):
    labels = [[-100 if i % 2 else token for i, token in enumerate(row)] for row in rows]
    some = (datasets.Dataset.from_dict({"input_ids": part}) for part in (rows[:70], rows[70:]))
    ids = datasets.concatenate_datasets(list(some))
    marks = datasets.Dataset.from_dict({"labels": labels})
    data = {
        "add_column": lambda: ids.add_column("labels", labels),
        "axis 1": lambda: datasets.concatenate_datasets([ids, marks], axis=1),
    }[way]()
    for chosen in (slice(0, 200), slice(60, 150)):
        some = data.select(range(chosen.start, chosen.stop))
        packs = list(PackedDataset(some, budget=128, shuffle=False, strategy="sequential"))
        flat = np.concatenate([pack.tokens for pack in packs]).tolist()
        assert flat == [token for row in rows[chosen] for token in row]
        assert np.concatenate([pack.labels for pack in packs]).tolist() == [
            x for own in labels[chosen] for x in [-100, *own[1:]]
        ]


@pytest.mark.parametrize("kind", ["dataset", "stream", "parquet"])
def test_fields_that_arrow_adds_to_chats_are_not_rendered(tmp_path, kind):
    """All entries of an Arrow column have the same fields, null where a row has none."""
    call = {"name": "f", "arguments": {"a": 1}}
    other = {"name": "g", "arguments": {"b": 2}}
    chats = [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
        [{"role": "user", "content": "w"}, {"role": "assistant", "content": None, "calls": [call]}],
        [{"role": "user", "content": "w"}, {"role": "assistant", "content": "x", "calls": [other]}],
    ]
    data = datasets.Dataset.from_list([{"messages": messages} for messages in chats])
    if kind == "parquet":
        data.to_parquet(tmp_path / "chats.parquet")
    source = open_source(
        {"dataset": data, "stream": data.to_iterable_dataset()}.get(kind)
        or str(tmp_path / "chats.parquet")
    )
    assert [row.value["messages"] for row in source.read(0, 1)] == chats
