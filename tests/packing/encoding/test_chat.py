"""Chat: loss on the assistant's turns only, with and without generation markers, verified."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from nopad.packing import IGNORE_INDEX
from nopad.packing.encoding import Encoder, encode_chat
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "marked": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
    "<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # Rewrites turns that are no longer the last, as reasoning models' templates do.
    "rewriting": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and "
    "loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "header of two": "{% for m in messages %}<|im_start|><|{{ m.role }}|>{{ m.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|><|assistant|>{% endif %}",
}
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "yes?"},
    {"role": "assistant", "content": "yes!"},
    {"role": "user", "content": "yes! again"},
    {"role": "assistant", "content": "no, yes!"},
]


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each byte, and the special tokens of chat."""
    vocabulary = {chr(i): i for i in range(128)} | {"<unk>": 128}
    inner = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    marks = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks, "eos_token": "<|im_end|>"})
    return tokenizer


def counted(tokenizer, sample):
    """The text of each run of labels."""
    runs, open_run = [], False
    for token, label in zip(sample.tokens.tolist(), sample.labels.tolist(), strict=True):
        if label != IGNORE_INDEX:
            assert label == token
            runs = [*runs[:-1], runs[-1] + [token]] if open_run else [*runs, [token]]
        open_run = label != IGNORE_INDEX
    return ["".join(tokenizer.convert_ids_to_tokens(run)) for run in runs]


@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_the_assistants_turns_and_their_end_count(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    runs = counted(tokenizer, encode_chat(tokenizer, CHAT))
    thought = "<think>\n\n</think>\n\n" if name == "rewriting" else ""
    assert runs == ["yes!<|im_end|>", f"{thought}no, yes!<|im_end|>"]


@pytest.mark.parametrize("name", ["chatml", "rewriting"])
def test_the_ids_are_those_of_the_whole_rendered_text(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert encode_chat(tokenizer, CHAT).tokens.tolist() == expected


DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nI say hello<|im_end|>\n{% endif %}"
)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["hello", "hello yes"])
def test_an_assistant_who_speaks_first_learns_no_header(tokenizer, name, content):
    tokenizer.chat_template = DEFAULT + TEMPLATES[name]
    chat = [{"role": "assistant", "content": content}, *CHAT[3:]]
    runs = counted(tokenizer, encode_chat(tokenizer, chat))
    assert runs[0] == f"{content}<|im_end|>" and len(runs) == 2


def test_a_first_message_whose_content_is_not_shown_is_refused(tokenizer):
    tokenizer.chat_template = TEMPLATES["chatml"].replace(
        "{{ m.content }}", "{{ '' if loop.first else m.content }}"
    )
    with pytest.raises(ValueError, match="its content is not in the full"):
        encode_chat(tokenizer, [{"role": "assistant", "content": "hello"}, *CHAT[3:]])


def words(*marks):
    """A tokenizer whose tokens are words with the space before them, and the line end after."""
    known = ["system:", " be", " kind\n", "user:", " yes?\n", "assistant:", " yes!\n", " again\n"]
    known += [" no,", "yes", "no,", " yes!"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *known])}))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[^ \n]+\n?"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    return tokenizer


def texts(tokenizer, sample, chat):
    """The text of each label."""
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    places = tokenizer(whole, return_offsets_mapping=True)["offset_mapping"]
    return [
        whole[a:b] for (a, b), x in zip(places, sample.labels, strict=True) if x != IGNORE_INDEX
    ]


def test_a_token_that_holds_something_of_an_answer_counts():
    tokenizer = words()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    sample = encode_chat(tokenizer, CHAT)
    assert texts(tokenizer, sample, CHAT) == [" yes!\n", " no,", " yes!\n"]


def test_marks_that_take_in_white_space_count_where_they_begin():
    tokenizer = words(*(AddedToken(f"<|{m}|>", rstrip=True) for m in ("user", "assistant", "end")))
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    chat = [CHAT[1], {"role": "assistant", "content": " yes"}, *CHAT[3:]]
    sample = encode_chat(tokenizer, chat)
    assert texts(tokenizer, sample, chat) == ["yes", "<|end|>\n", "no,", " yes!", "<|end|>\n"]


def test_of_prompt_and_completion_only_the_completion_counts(tokenizer):
    tokenizer.chat_template = TEMPLATES["chatml"]
    (sample,) = Encoder(tokenizer).encode([{"prompt": CHAT[:4], "completion": CHAT[4:]}])
    assert counted(tokenizer, sample) == ["no, yes!<|im_end|>"]


def test_a_template_that_hides_the_assistant_trains_nothing_and_is_refused(tokenizer):
    tokenizer.chat_template = (
        "x{% for m in messages %}{% if m.role == 'nobody' %}{% generation %}y{% endgeneration %}"
        "{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="no labels are left"):
        encode_chat(tokenizer, CHAT)


def test_a_template_that_rewrites_what_stands_before_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATES["chatml"]
    with pytest.raises(ValueError, match="generation markers"):
        encode_chat(tokenizer, CHAT)


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_the_template_is_shown_the_rows_tools(tokenizer, name):
    tools = [{"type": "function", "function": {"name": "add"}}]
    head = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    tokenizer.chat_template = head + TEMPLATES[name]
    plain, shown = Encoder(tokenizer).encode(
        [{"messages": CHAT}, {"messages": CHAT, "tools": tools}]
    )
    assert shown.tokens.tolist() == [*map(ord, "add"), *plain.tokens.tolist()]
    assert counted(tokenizer, shown) == counted(tokenizer, plain)


@pytest.mark.parametrize("shape", ["messages", "prompt and completion"])
def test_tools_may_be_stored_as_json_text(tokenizer, shape):
    tools = [{"type": "function", "function": {"name": "add"}}]
    head = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    tokenizer.chat_template = head + TEMPLATES["chatml"]
    chat = (
        {"messages": CHAT} if shape == "messages" else {"prompt": CHAT[:4], "completion": CHAT[4:]}
    )
    stored = [tools, json.dumps(tools), None, "null", "[]", ""]
    out = Encoder(tokenizer).encode([{**chat, "tools": each} for each in stored])
    shown, as_text, *without = [sample.tokens.tolist() for sample in out]
    assert as_text == shown == [*map(ord, "add"), *without[0]]
    assert without == [without[0]] * 4


@pytest.mark.parametrize(("tools", "word"), [("add", "'add'"), ({"a": 1}, "dict"), ("{}", "dict")])
def test_tools_that_are_no_list_are_told(tokenizer, tools, word):
    tokenizer.chat_template = TEMPLATES["chatml"]
    (error,) = Encoder(tokenizer).encode([{"messages": CHAT, "tools": tools}])
    assert isinstance(error, ValueError)
    assert str(error) == f"tools must be a list of schemas, got {word}"


def test_messages_need_a_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has none"):
        encode_chat(tokenizer, CHAT)


def test_a_real_tokenizer_agrees(tokenizer):
    shared = Path(os.environ.get("NOPAD_SHARED") or Path(__file__).parents[4] / "shared")
    if not (shared / "models" / "stories260k").is_dir():
        pytest.skip(reason="the stories260k model is not there: set NOPAD_SHARED")
    real = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    real.chat_template = TEMPLATES["chatml"]
    sample = encode_chat(real, CHAT)
    text = "".join(real.decode([t]) for t in sample.tokens[sample.labels != IGNORE_INDEX])
    assert "yes!" in text.replace(" ", "") and "again" not in text
    assert np.count_nonzero(sample.labels != IGNORE_INDEX) < len(sample) / 2


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"training": 0}, {"loss": 0.0}])
def test_a_turn_that_says_it_does_not_count_is_no_label(tokenizer, name, flag):
    tokenizer.chat_template = TEMPLATES[name]
    chat = [*CHAT[:2], {**CHAT[2], **flag}, *CHAT[3:]]
    thought = "<think>\n\n</think>\n\n" if name == "rewriting" else ""
    assert counted(tokenizer, encode_chat(tokenizer, chat)) == [f"{thought}no, yes!<|im_end|>"]
    last = [*CHAT[:4], {**CHAT[4], **flag}]
    assert counted(tokenizer, encode_chat(tokenizer, last)) == ["yes!<|im_end|>"]
    with pytest.raises(ValueError, match="every assistant turn is excluded"):
        encode_chat(tokenizer, [*CHAT[:2], {**CHAT[2], **flag}])


@pytest.mark.parametrize("flag", [{"weight": 1}, {"train": True}, {"weight": None, "train": None}])
def test_flags_that_change_nothing_are_accepted(tokenizer, flag):
    tokenizer.chat_template = TEMPLATES["chatml"]
    chat = [{**m, **flag} if m["role"] == "assistant" else {**m, "weight": 0} for m in CHAT]
    assert counted(tokenizer, encode_chat(tokenizer, chat)) == [
        "yes!<|im_end|>",
        "no, yes!<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("turn", "flag", "told"),
    [
        (2, {"weight": 0.5}, "weight=0.5: pass 0 or 1"),
        (2, {"train": "false"}, "train='false'"),
        (2, {"train_detail": [{"begin_offset": 0}]}, "message 2 has train_detail"),
        (1, {"train": True}, "the role user: only turns of the assistant are trained"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(tokenizer, turn, flag, told):
    tokenizer.chat_template = TEMPLATES["chatml"]
    chat = [{**m, **flag} if t == turn else m for t, m in enumerate(CHAT)]
    with pytest.raises(ValueError, match=told):
        encode_chat(tokenizer, chat)


TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}BEGIN"
    "{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}<call>"
    "{{ c.function | tojson }}</call>{% endfor %}<|im_end|>END{{ '\n' }}{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}[{{ m.content }}]"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def random_chat(rng) -> list[dict]:
    """A chat of questions, answers, calls and results of tools, some of them not to be trained."""
    turns, words = [], ["yes", "no", "yes yes", "[yes]", " a ", "assistant"]
    for _ in range(rng.integers(1, 4)):
        turns.append({"role": "user", "content": str(rng.choice(words))})
        for _ in range(rng.integers(1, 3)):
            turn = {"role": "assistant", "content": str(rng.choice(words))}
            if rng.random() < 0.3:
                turn[str(rng.choice(["weight", "train", "loss"]))] = bool(rng.integers(2))
            turns.append(turn)
            if rng.random() < 0.5:
                turn["tool_calls"] = [{"function": {"name": "f", "arguments": {}}}]
                turn["content"] = None if rng.random() < 0.5 else turn["content"]
                turns += [{"role": "tool", "content": "ok"}] * int(rng.integers(1, 3))
    return turns


def expected_text(turn: dict) -> str:
    calls = [f"<call>{json.dumps(call['function'])}</call>" for call in turn.get("tool_calls", [])]
    return (turn["content"] or "") + "".join(calls) + "<|im_end|>"


@pytest.mark.parametrize("is_marked", [True, False])
def test_of_chats_with_tools_and_flags_exactly_the_trained_answers_count(tokenizer, is_marked):
    begin, end = ("{% generation %}", "{% endgeneration %}") if is_marked else ("", "")
    tokenizer.chat_template = TOOL_TEMPLATE.replace("BEGIN", begin).replace("END", end)
    encoder = Encoder(tokenizer)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        chat, tools = random_chat(rng), [{"name": "f"}] if rng.random() < 0.5 else None
        trained = [
            turn for turn in chat if turn["role"] == "assistant"
            and all(turn.get(flag, True) for flag in ("weight", "train", "loss"))
        ]  # fmt: skip
        (sample,) = encoder.encode([{"messages": chat, "tools": tools}])
        if not trained:
            assert "no labels are left" in str(sample)
            continue
        assert counted(tokenizer, sample) == [expected_text(turn) for turn in trained]
        text = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
        assert sample.tokens.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
