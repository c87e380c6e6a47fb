"""Rows to samples: text, prompts and completions, ready ids, batches with bad rows among them."""

import numpy as np
import pytest
import torch
from nopad.packing import IGNORE_INDEX, PackedDataset, Sample
from nopad.packing.encoding import Encoder
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer():
    """A word tokenizer with bos and eos, made here: nothing is downloaded."""
    words = ["<unk>", "<s>", "</s>", "hello", "world", "what", "is", "up", "?", "fine"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def one(encoder, row):
    (sample,) = encoder.encode([row])
    if isinstance(sample, ValueError):
        raise sample
    return sample


def test_text_gets_what_the_tokenizer_adds_and_an_end(tokenizer):
    sample = one(Encoder(tokenizer), {"text": "hello world"})
    assert sample.tokens.tolist() == [1, 3, 4, 2]
    assert sample.labels.tolist() == [IGNORE_INDEX, 3, 4, 2]


def test_the_end_can_be_another_or_none_and_is_not_doubled(tokenizer):
    row = {"text": "hello </s>"}
    assert one(Encoder(tokenizer, add_eos=False), {"text": "hello"}).tokens.tolist() == [1, 3]
    assert one(Encoder(tokenizer, add_eos=9), {"text": "hello"}).tokens.tolist() == [1, 3, 9]
    assert one(Encoder(tokenizer), row).tokens.tolist() == [1, 3, 2]


def test_only_the_completion_counts(tokenizer):
    sample = one(Encoder(tokenizer), {"prompt": "what is up ?", "completion": "fine"})
    assert sample.tokens.tolist() == [1, 5, 6, 7, 8, 9, 2]
    assert sample.labels.tolist() == [IGNORE_INDEX] * 5 + [9, 2]


MERGES = [("▁", "a"), ("t", "i"), ("m", "e"), ("ti", "me"), ("▁", "time"), ("▁", "y")]


@pytest.fixture(scope="module")
def spaced():
    """A tokenizer that puts a space before every text and ends every text, as some do."""
    pieces = [
        "<unk>",
        "</s>",
        "▁",
        "▁a",
        "ti",
        "me",
        "time",
        "▁time",
        "t",
        "i",
        "m",
        "e",
        "a",
        ":",
        "y",
        "▁y",
    ]
    inner = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, MERGES, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


class Slow:
    """The same tokenizer, without offsets."""

    def __init__(self, inner):
        self.inner, self.eos_token_id = inner, inner.eos_token_id

    def __call__(self, text):
        return self.inner(text)["input_ids"]


@pytest.mark.parametrize("kind", [lambda fast: fast, Slow])
@pytest.mark.parametrize(
    ("prompt", "completion", "counted"),
    [("a ", "time", ["▁time"]), ("a", " time", ["▁time"]), ("a:", "y", ["y"]), ("a t", "ime", [])],
)
def test_a_prompt_and_its_completion_are_tokenized_as_one_text(
    spaced, kind, prompt, completion, counted
):
    sample = one(Encoder(kind(spaced)), {"prompt": prompt, "completion": completion})
    assert sample.tokens.tolist() == spaced(prompt + completion)["input_ids"]
    marks = spaced.convert_ids_to_tokens(sample.tokens[sample.labels != IGNORE_INDEX].tolist())
    assert marks == [*(counted or ["▁time"]), "</s>"]


@pytest.mark.parametrize("call", [None, lambda text: [ord(letter) for letter in text]])
def test_a_prompt_may_be_empty(tokenizer, call):
    sample = one(Encoder(call or tokenizer, add_eos=2), {"prompt": "", "completion": "hello"})
    assert sample.labels.tolist() == [IGNORE_INDEX, *sample.tokens.tolist()[1:]] and len(sample) > 2


@pytest.mark.parametrize("row", [{"text": "hello"}, {"prompt": "what", "completion": "hello"}])
def test_null_columns_are_none_where_rows_of_several_kinds_share_a_table(tokenizer, row):
    names = ("text", "prompt", "completion", "messages", "tools", "input_ids", "labels")
    filled = one(Encoder(tokenizer), {**dict.fromkeys(names), **row})
    assert filled.labels.tolist() == one(Encoder(tokenizer), row).labels.tolist()


def test_a_row_of_nulls_is_told_by_its_own_column(tokenizer):
    with pytest.raises(ValueError, match="text must be text, got NoneType"):
        one(Encoder(tokenizer), {"text": None, "labels": None})


def test_null_labels_beside_a_mask_are_no_labels():
    with pytest.raises(ValueError, match="completion_mask without labels"):
        one(Encoder(), {"input_ids": [1, 2], "labels": None, "completion_mask": [0, 1]})


@pytest.mark.parametrize("eos", [None, "</s>", 2.5])
def test_an_end_that_is_no_id_is_refused(tokenizer, eos):
    with pytest.raises(
        ValueError, match=f"add_eos={eos!r}: pass True for the tokenizer's eos, an id, or F"
    ):
        Encoder(tokenizer, add_eos=eos)


def test_the_column_can_be_named(tokenizer):
    assert one(Encoder(tokenizer, text_column="body"), {"body": "hello"}).tokens.tolist() == [
        1,
        3,
        2,
    ]
    with pytest.raises(ValueError, match="text_column="):
        one(Encoder(tokenizer), {"body": "hello"})


def test_ready_ids_and_labels_are_taken_as_they_are(tokenizer):
    sample = one(
        Encoder(tokenizer), {"input_ids": [3, 4, 5], "labels": [IGNORE_INDEX, IGNORE_INDEX, 5]}
    )
    assert sample.tokens.tolist() == [3, 4, 5] and sample.labels.tolist() == [
        IGNORE_INDEX,
        IGNORE_INDEX,
        5,
    ]
    assert one(Encoder(), np.array([7, 8], np.uint16)).tokens.tolist() == [7, 8]
    assert one(Encoder(), Sample(np.array([7, 8]))).tokens.tolist() == [7, 8]


def test_an_id_beyond_the_tokenizers_vocabulary_is_refused(tokenizer):
    with pytest.raises(ValueError, match="input_ids contains 10, the vocabulary has 10 entries"):
        one(Encoder(tokenizer), {"input_ids": [1, 10]})


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="pass tokenizer="):
        one(Encoder(), {"text": "hello"})


def test_a_bad_row_leaves_its_neighbours_in_place(tokenizer):
    rows = [{"text": "hello"}, {"text": "a\ud800"}, {"input_ids": [-1]}, {"text": "world"}]
    out = Encoder(tokenizer).encode(rows)
    assert [type(one) for one in out] == [Sample, ValueError, ValueError, Sample]
    assert out[0].tokens.tolist() == [1, 3, 2] and out[3].tokens.tolist() == [1, 4, 2]


def test_a_batch_equals_its_rows_one_by_one(tokenizer):
    rows = [{"text": "hello world"}, {"prompt": "what", "completion": "is"}, {"text": "up ?"}]
    encoder = Encoder(tokenizer)
    whole = [sample.tokens.tolist() for sample in encoder.encode(rows)]
    assert whole == [one(encoder, row).tokens.tolist() for row in rows]


def test_a_text_without_a_token_is_an_error_in_its_place():
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "what": 1, "hello": 2}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    rows = [{"text": "hello"}, {"text": "  "}, {"prompt": "what", "completion": " "}]
    out = Encoder(tokenizer, add_eos=False).encode(rows)
    assert [type(one) for one in out] == [Sample, ValueError, ValueError]
    assert "input_ids is empty" in str(out[1]) and "completion is empty" in str(out[2])


def test_what_a_tokenizer_makes_of_text_is_held_to_the_vocabulary_too(tokenizer):
    with pytest.raises(ValueError, match="input_ids contains 9, the vocabulary has 9 entries"):
        one(Encoder(tokenizer, vocab_size=9), {"text": "fine"})
    with pytest.raises(ValueError, match="input_ids contains -3: ids start at 0"):
        one(Encoder(lambda text: [5, -3]), {"text": "fine"})


def test_a_vocabulary_with_gaps_has_ids_beyond_its_number_of_entries():
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "z": 40}, "<unk>"))
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=inner), add_eos=False)
    assert one(encoder, {"text": "z"}).tokens.tolist() == [40]


def test_tensors_are_rows_of_ids():
    assert one(Encoder(), torch.tensor([7, 8])).tokens.tolist() == [7, 8]
    with pytest.raises(ValueError, match="float32"):
        one(Encoder(), torch.tensor([7.5]))


@pytest.mark.parametrize("mask", ["loss_mask", "completion_mask", "assistant_masks"])
def test_a_mask_that_would_be_passed_over_is_refused(mask):
    row = {"input_ids": [1, 2, 3], mask: [0, 1, 1]}
    with pytest.raises(ValueError, match=f"{mask} without labels"):
        one(Encoder(), row)
    assert one(Encoder(), {**row, "labels": [-100, 2, 3]}).labels.tolist() == [-100, 2, 3]
    with pytest.raises(ValueError, match=f"a token that {mask} excludes has a label"):
        one(Encoder(), {**row, "labels": [1, 2, 3]})
    with pytest.raises(ValueError, match=f"{mask} must be 0 or 1 for each label"):
        one(Encoder(), {**row, mask: [0.5, 1, 1], "labels": [-100, 2, 3]})


def test_rows_that_say_twice_what_is_trained_are_refused(tokenizer):
    pair, chat = {"prompt": "what", "completion": " fine"}, {"messages": [{"role": "user"}]}
    for row in ({"text": "hello", **pair}, {"text": "hello", **chat}, {**pair, **chat}):
        with pytest.raises(ValueError, match="but only one can be trained on: remove the others"):
            one(Encoder(tokenizer), row)
    empty = {"text": None, **pair}
    assert one(Encoder(tokenizer), empty).labels.tolist()[:2] == [IGNORE_INDEX, IGNORE_INDEX]
    chosen = Encoder(tokenizer, text_column="prompt")
    assert one(chosen, pair).tokens.tolist() == one(chosen, {"prompt": "what"}).tokens.tolist()
    with pytest.raises(ValueError, match="loss_mask applies to token ids, but the row has none"):
        one(Encoder(tokenizer), {"text": "hello", "loss_mask": [1]})


@pytest.mark.parametrize("labels", [[2, 3, 4, -100], [-100, 3, 4, -100], [3, -100, -100, -100]])
def test_labels_that_were_shifted_already_are_refused(labels):
    row = {"input_ids": [1, 2, 3, 4], "labels": labels}
    with pytest.raises(ValueError, match="pass labels unshifted, the model shifts"):
        one(Encoder(), row)
    with pytest.raises(ValueError, match="pass labels unshifted"):
        Sample(np.array([1, 2, 3, 4]), np.array(labels))


def test_padding_is_not_taken_for_text():
    whole = {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}
    assert one(Encoder(), whole).tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="attention_mask contains 0"):
        one(Encoder(), {**whole, "attention_mask": [1, 1, 0]})


def test_a_tokenizer_that_only_knows_its_size_bounds_the_ids():
    class Letters:
        def __len__(self):
            return 128

        def __call__(self, text):
            return [ord(letter) for letter in text]

    assert one(Encoder(Letters()), {"text": "ab"}).tokens.tolist() == [97, 98]
    with pytest.raises(ValueError, match="input_ids contains 233, the vocabulary has 128 entries"):
        one(Encoder(Letters()), {"text": "é"})


@pytest.mark.parametrize("tools", ["[not JSON", {"name": "add"}, 7])
def test_rows_without_chat_do_not_care_what_their_tools_are(tokenizer, tools):
    row = {"text": "hello", "tools": tools}
    assert one(Encoder(tokenizer), row).tokens.tolist() == [1, 3, 2]
    pair = {"prompt": "what", "completion": " fine", "tools": tools}
    assert one(Encoder(tokenizer), pair).tokens.tolist() == [1, 5, 9, 2]


def test_the_name_of_a_tokenizer_is_not_a_tokenizer(tmp_path):
    for name in ("gpt2", tmp_path):
        with pytest.raises(ValueError, match=r"is a name: pass AutoTokenizer\.from_pretrained\('"):
            PackedDataset([{"text": "abc"}], tokenizer=name, budget=16)
    with pytest.raises(ValueError, match="tokenizer is a int: pass a Hugging Face tokenizer"):
        Encoder(7)
