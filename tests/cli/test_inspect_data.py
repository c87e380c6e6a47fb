"""`nopad inspect` reports what packing does."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import warm_python
from nopad.__main__ import main
from nopad.cli import inspect_data, printable
from nopad.cli.counted_rows import CountedRows, open_counted
from nopad.cli.data_report import budget_rows, labelled_samples, pack_map
from nopad.packing import Pack, PackedDataset, Sample
from nopad.packing.planning import padded_fill
from small_checkpoint import CHAT, small_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def data(tmp_path):
    draw = np.random.default_rng(0)
    rows = [{"input_ids": draw.integers(1, 99, n).tolist()} for n in draw.integers(2, 60, 200)]
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_of_tokens_is_shown_whole(data, tmp_path, capsys):
    page = tmp_path / "new" / "map.html"
    assert main(["inspect", str(data), "--budget", "128", "--packs", "3", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "200 samples" in out and "max 59" in out
    assert "padded batches of 128 positions would be " in out
    assert out.count(" samples\n") == 4 and "\x1b" not in out
    assert "pack 0: " in out and "[[" in out
    assert "a block is a sample, blank is unused\n" in out and "in padded batches\n" in out
    assert out.endswith(f"\nreport: {page}\n")
    assert page.read_text().count("% samples") == 0 and page.read_text().count('class="map"') == 1


def test_of_a_stream_whole_samples_are_measured_not_their_parts(tmp_path, monkeypatch, capsys):
    """Streams that are not pretokenized split long samples; the parts are not samples."""
    monkeypatch.setattr("nopad.packing.pipeline.SMALL_BYTES", 0)
    monkeypatch.setattr("nopad.cli.inspect_data.MAX_STREAM_PACKS", 1000)
    path = tmp_path / "long.jsonl"
    rows = [{"input_ids": [1] * (200 if i % 3 == 0 else 10)} for i in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["inspect", str(path), "--budget", "64"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("300 samples, 22,000 tokens; length: median 10, p99 200, max 200")
    monkeypatch.setattr("nopad.cli.inspect_data.MAX_STREAM_PACKS", 8)
    assert main(["inspect", str(path), "--budget", "64"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("the first 7 samples, ") and "max 200" in out
    waste = 1 - padded_fill(np.array([len(row["input_ids"]) for row in rows[:7]]), 64)
    assert f"would be {waste:.1%} padding" in out
    assert main(["inspect", str(path), "--budget", "64", "--samples", "299"]) == 0
    assert capsys.readouterr().out.startswith("the first 299 samples, ")
    assert main(["inspect", str(path), "--budget", "64", "--samples", "300"]) == 0
    assert capsys.readouterr().out.startswith("300 samples, 22,000 tokens")


@pytest.mark.parametrize(
    "options",
    [{}, {"overflow": "drop"}, {"overflow": "truncate"}, {"max_length": 20},
     {"max_length": 20, "overflow": "drop"}, {"max_length": 20, "overflow": "truncate"}],
)  # fmt: skip
def test_padded_fill_is_that_of_the_samples_as_they_are_cut(data, capsys, options):
    """The oracle cuts each sample by itself and pads whole batches."""
    budget, longest = 32, options.get("max_length", 32)
    cut = {
        "split": lambda n: [longest] * (n // longest) + [n % longest] * (n % longest > 0),
        "truncate": lambda n: [min(n, longest)],
        "drop": lambda n: [n] * (n <= longest),
    }[options.get("overflow", "split")]
    lengths = [len(json.loads(line)["input_ids"]) for line in data.read_text().splitlines()]
    drawn = np.random.default_rng(0).choice(lengths, len(lengths), replace=False)
    batches = [[]]
    for part in (part for n in drawn.tolist() for part in cut(n)):
        if part == budget:
            batches.insert(0, [part])
        elif (len(batches[-1]) + 1) * max([part, *batches[-1]]) > budget:
            batches.append([part])
        else:
            batches[-1].append(part)
    fill = sum(map(sum, batches)) / (budget * len([batch for batch in batches if batch]))
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main(["inspect", str(data), "--budget", "32", *given]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith("%")]
    assert next(row for row in rows if row[0] == "32")[-1] == f"{fill:.2%}"


def test_of_many_samples_it_says_that_they_are_the_first(data, monkeypatch, capsys):
    monkeypatch.setattr("nopad.cli.inspect_data.MAX_LENGTHS", 150)
    assert main(["inspect", str(data), "--budget", "128"]) == 0
    assert capsys.readouterr().out.startswith("the first 150 of 200 samples, ")


def test_a_folder_of_several_kinds_is_told_with_the_option_that_chooses(data, capsys):
    (data.parent / "LICENSE").write_text("All rights reserved.")
    assert main(["inspect", str(data.parent)]) == 2
    assert capsys.readouterr().err.endswith("files: choose some with --glob\n")
    assert main(["inspect", str(data.parent), "--glob", "*.jsonl"]) == 0
    assert "200 samples" in capsys.readouterr().out


def test_flat_tokens_are_inspected(tmp_path, capsys):
    np.array([5, 6, 0, 7, 8, 9, 0], np.uint16).tofile(tmp_path / "flat.bin")
    assert main(["inspect", str(tmp_path / "flat.bin")]) == 2
    assert "need --dtype (uint16 or uint32) and --add-eos (an id)" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "flat.bin"), "--dtype", "uint16", "--add-eos", "0"]) == 0
    assert "2 samples, 7 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_a_bad_row_stops_it_or_is_left_out_and_counted(data, small, monkeypatch, capsys):
    monkeypatch.setattr("nopad.packing.pipeline.SMALL_BYTES", small)
    with data.open("a") as file:
        file.write('{"input_ids": []}\n')
    assert main(["inspect", str(data), "--budget", "128"]) == 2
    assert "ids.jsonl, line 201: " in (err := capsys.readouterr().err) and "--on-error skip" in err
    assert main(["inspect", str(data), "--budget", "128", "--on-error", "skip"]) == 0
    out = capsys.readouterr().out
    assert "200 samples" in out and "1 rows skipped; the first: ids.jsonl, line 201: " in out


def test_text_without_a_tokenizer_is_told_of_the_option(tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text('{"text": "Once"}\n{"body": "Once"}\n')
    assert main(["inspect", str(tmp_path / "text.jsonl")]) == 2
    assert "pass --tokenizer (pass --on-error skip" in capsys.readouterr().err


def test_a_sample_too_long_is_told_with_what_the_option_takes(data, capsys):
    assert main(["inspect", str(data), "--budget", "8", "--overflow", "error"]) == 2
    assert ": choose --overflow (split, truncate or drop)" in capsys.readouterr().err


def test_rows_of_another_layout_and_a_shorter_length_are_inspected(
    checkpoint_dir, tmp_path, capsys
):
    row = {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d"}]}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 5)
    given = [str(tmp_path / "chats.jsonl"), "--tokenizer", str(checkpoint_dir), "--budget", "64"]
    assert main(["inspect", *given]) == 2
    assert "pass --format sharegpt" in capsys.readouterr().err
    page = tmp_path / "page.html"
    given += ["--format", "sharegpt", "--max-length", "8", "--html", str(page)]
    assert main(["inspect", *given]) == 0
    out = capsys.readouterr().out
    line = next(each for each in out.splitlines() if each.startswith("    64"))
    assert line.split()[4] == "5", "all are longer than --max-length"
    limit = "samples longer than 8 tokens (--max-length) or the budget; they are split"
    assert limit in out and limit in page.read_text()


def test_chats_for_a_tokenizer_without_a_template_take_one_from_a_file(tmp_path, capsys):
    tokenizer = small_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 5)
    (tmp_path / "chat.jinja").write_text(CHAT)
    given = ["inspect", str(tmp_path / "chats.jsonl"), "--budget", "64"]
    assert main([*given, "--chat-template", "x"]) == 2
    given += ["--tokenizer", str(tmp_path / "tokenizer")]
    assert main(given) == 2
    assert "this one has none: pass --chat-template FILE, or use" in capsys.readouterr().err
    assert main([*given, "--chat-template", str(tmp_path / "none.jinja")]) == 2
    assert main([*given, "--chat-template", str(tmp_path / "chat.jinja")]) == 0
    assert "5 samples" in capsys.readouterr().out


def test_an_end_that_is_no_token_is_told_of_the_option(checkpoint_dir, tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text('{"text": "Once"}\n')
    given = [str(tmp_path / "text.jsonl"), "--tokenizer", str(checkpoint_dir)]
    assert main(["inspect", *given, "--add-eos", "999999"]) == 2
    err = capsys.readouterr().err
    assert "--add-eos 999999: the vocabulary has the ids from 0 " in err and "--on-error" not in err


def test_what_cannot_be_read_is_one_line_and_status_two(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "none.jsonl")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_only_what_counts_stands_in_brackets(capsys):
    sample = Sample(np.array([5, 6, 7, 8]), np.array([-100, -100, 7, 8]))
    inspect_data._print_pack(Pack.of([sample], 8), None)
    assert capsys.readouterr().out.rstrip().endswith("4 tokens  5 6[[7 8]]")


def test_a_space_before_what_counts_is_kept(capsys):
    words = ["▁Answer:", "▁Mario", "'s", "▁hat"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    sample = Sample(np.arange(4), np.array([-100, 1, 2, -100]))
    spans = [("Answer:", False), (" Mario's", True), (" hat", False)]
    assert labelled_samples(Pack.of([sample], 8), tokenizer, 80) == [(4, spans)]
    inspect_data._print_pack(Pack.of([sample], 8), tokenizer)
    assert "Answer:[[ Mario's]] hat" in capsys.readouterr().out


def test_the_map_draws_every_token_once():
    row = pack_map.draw_pack([100, 28], budget=128, width=64).plain
    assert len(row) == 64 and row.count("█") == 50 and row.count("▓") == 14


def test_fill_and_waste_are_those_of_the_lengths():
    row = budget_rows(np.full(64, 32), 128, "split")[2]
    assert (row.budget, row.fill, row.padded, row.step_ratio) == (128, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("overflow", "per_pack"),
    [("drop", [None, 1.0, 2.0, 2.0]), ("split", [1.0, 1.0, 1.5, 2.0])],
)
def test_a_pack_is_said_to_hold_what_lies_in_it(overflow, per_pack):
    """Neither what was dropped, nor documents where their parts were packed."""
    rows = budget_rows(np.array([10, 10, 30, 30]), 20, overflow)
    assert [row.samples_per_pack for row in rows] == per_pack


def test_a_reader_that_has_read_enough_is_answered_as_by_sigpipe(data):
    command = ["-m", "nopad", "inspect", str(data), "--budget", "128"]
    reading, writing = os.pipe()
    os.close(reading)
    done = warm_python.run(command, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


ESCAPES = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\r\x08\u202e"
CONTROLS = set("\x1b\x07\x9b\r\x08\u202e")


def test_escape_sequences_of_the_data_are_shown_not_sent(tmp_path, capsys):
    class Tokenizer:
        def decode(self, ids):
            return f"Once{ESCAPES}"

    inspect_data._print_pack(Pack.of([Sample(np.array([5, 6]))], 8), Tokenizer())
    text = capsys.readouterr().out
    assert not CONTROLS & set(text) and r"Once\u001b]52;c;" in text
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2]}) + '\n{"\x9b": \x9b}\n')
    assert main(["inspect", str(path), "--on-error", "skip"]) == 0
    assert main(["inspect", str(path)]) == 2
    assert main(["inspect", str(tmp_path / f"none{ESCAPES}.jsonl")]) == 2
    said = "".join(capsys.readouterr())
    assert not CONTROLS & set(said) and r"none\u001b]52" in said


def test_printable_text_stays_as_it_is():
    text = "naïve 日本\t👩\u200d🚀\n"
    assert printable(text) == text and printable("a\x1bb") == r"a\u001bb"


def test_a_budget_beyond_memory_is_one_line(data, capsys):
    assert main(["inspect", str(data), "--budget", "1000000000000"]) == 2
    told = "nopad inspect: budget 1000000000000: a pack has at most 268435456 tokens\n"
    assert capsys.readouterr().err == told


def test_the_folder_one_stands_in_is_read(data, monkeypatch, capsys):
    monkeypatch.chdir(data.parent)
    assert main(["inspect", ".", "--budget", "128"]) == 0
    assert "200 samples" in capsys.readouterr().out


def test_data_whose_rows_are_all_skipped_says_why(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": "abc"}\n')
    with pytest.raises(ValueError, match=r"^every row was skipped; the first: .*got str"):
        inspect_data.main([str(tmp_path / "a.jsonl"), "--on-error", "skip"])
    with pytest.raises(ValueError, match="the name of the data is empty"):
        inspect_data.main([""])


HOSTILE = "</mark></pre><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\x1b[2J\u202e"


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)

    def handle_data(self, data):
        self.text += data


def test_the_page_is_one_file_that_data_cannot_write_code_into(tmp_path, monkeypatch, capsys):
    tokenizer = small_tokenizer()
    tokenizer.decode = lambda ids: HOSTILE * len(ids)
    monkeypatch.setattr(inspect_data, "load_tokenizer", lambda _: tokenizer)
    path = tmp_path / "a<b>.jsonl"
    path.write_text('{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}\n' * 9)
    page = tmp_path / "page.html"
    given = ["--tokenizer", "t", "--budget", "16", "--html", str(page)]
    assert inspect_data.main([str(path), *given]) == 0
    read = Page(page.read_text())
    assert not {"script", "img", "link", "iframe"} & set(read.tags)
    assert read.tags.count("mark") == 1 + read.tags.count("pre") > 2, "one in the legend"
    assert "default-src 'none'" in page.read_text()
    assert "<script>alert(1)</script>" in read.text and "a<b>.jsonl" in read.text
    assert not {"\x1b", "\u202e"} & set(page.read_text())


def test_a_terminal_has_colour_unless_it_is_switched_off(terminal, data, capsys):
    def shown() -> str:
        assert main(["inspect", str(data), "--budget", "128"]) == 0
        return capsys.readouterr().out

    out = shown()
    assert "\x1b[38;5;" in out and "[[" not in out
    plain = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert "0 ██" in plain and "█▓" in plain, "the map is there without its colours"
    assert max(map(len, plain.splitlines()[:20])) <= 80
    terminal("NO_COLOR", "1")
    out = shown()
    assert "\x1b[38" not in out and "[[" in out and "▓" in out


def test_rows_are_counted_while_they_are_tokenized_and_stay_the_same(data):
    options = {"add_eos": True, "glob": None, "dtype": None, "text_column": "text"}
    done: list[int] = []
    source = open_counted(str(data), None, options, done.append)
    assert isinstance(source, CountedRows)
    counted, plain = (PackedDataset(each, budget=128, seed=3) for each in (source, str(data)))
    assert sum(done) == 200
    assert [p.tokens.tolist() for p in counted] == [p.tokens.tolist() for p in plain]
    assert counted.state_dict() == plain.state_dict()


def test_a_long_text_is_cut_in_the_middle():
    pack = Pack.of([Sample(np.arange(9, 99))], 99)
    ((length, (first, rest)),) = labelled_samples(pack, None, 20)
    assert length == 90 and first == ("9", False)
    assert rest.text.startswith("10 11") and rest.text.endswith("98") and " … " in rest.text


def test_loss_tokens_duplicates_and_extremes_are_named(tmp_path, monkeypatch, capsys):
    rows = [[5, 6, 7], [5, 6, 7], list(range(20)), [8, 9]]
    labels = [[-100, -100, 7], [-100, -100, 7], list(range(20)), [-100, -100]]
    pairs = zip(rows, labels, strict=True)
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"input_ids": r, "labels": n}) + "\n" for r, n in pairs]
    path.write_text("".join([lines[0], "\n", *lines[1:]]))  # an empty line is not a row
    told = [
        "in the loss: 75.0% of the tokens; without labels: 1 (rows.jsonl, line 5); "
        "duplicates: 1 (rows.jsonl, line 3)",
        "longest: 20, 3, 3 tokens (rows.jsonl, lines 4, 3, 1); truncated: 1 (rows.jsonl, line 4)",
        "shortest: 2, 3, 3 tokens (rows.jsonl, lines 5, 1, 3)",
    ]
    given = ["inspect", str(path), "--budget", "16", "--overflow", "truncate"]
    for small in (1 << 20, 0):  # stored, and streamed
        monkeypatch.setattr("nopad.packing.pipeline.SMALL_BYTES", small)
        page = tmp_path / "page.html"
        assert main([*given, "--html", str(page)]) == 0
        assert capsys.readouterr().out.splitlines()[1:4] == told
        assert all(f"<p>{line}</p>" in page.read_text() for line in told)
    assert main([*given, "--decode", "2"]) == 0
    assert capsys.readouterr().out.count("tokens, ") >= 2


def test_tokens_of_chats_are_told_by_role(checkpoint_dir, tmp_path, capsys):
    turns = [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "d"}]
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"messages": turns}) + "\n") * 3)
    given = ["inspect", str(path), "--tokenizer", str(checkpoint_dir), "--budget", "64"]
    assert main(given) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("tokens by role"))
    found = re.fullmatch(
        r"tokens by role in 3 chats: user ([\d.]+)%, assistant ([\d.]+)%, template ([\d.]+)%", line
    )
    user, assistant, template = map(float, found.groups())
    assert user > assistant > 0 and abs(user + assistant + template - 100) < 0.2


def test_a_mixture_is_inspected_with_its_weights(data, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text('{"input_ids": [1, 2, 3, 4]}\n' * 50)
    assert main(["inspect", f"{data}=3", f"{other}=1", "--budget", "128"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("250 samples")
    assert f"source {other}: weight 1, 25.0% of the packs; 50 samples" in out
    assert main(["inspect", str(data), str(other)]) == 2
    assert "several sources need weights: a.jsonl=0.7 b.jsonl=0.3" in capsys.readouterr().err
    assert main(["inspect", f"{data}=3"]) == 2
    assert "one source needs no weight" in capsys.readouterr().err


def test_every_sample_of_small_data_is_examined_and_of_ready_tokens_as_many_as_asked(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("nopad.cli.inspect_data.MAX_STREAM_PACKS", 1)
    path = tmp_path / "rows.jsonl"
    rows = [[i // 2 % 50 + 1] * 4 for i in range(100)]  # each twice, one after the other
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    assert main(["inspect", str(path), "--budget", "16"]) == 0
    assert "duplicates: 50 (rows.jsonl, lines 2, 4, 6, ...)" in capsys.readouterr().out
    tokens = tmp_path / "tokens.bin"
    np.concatenate([[*row, 0] for row in rows]).astype(np.uint16).tofile(tokens)
    given = ["inspect", str(tokens), "--dtype", "uint16", "--add-eos", "0", "--budget", "16"]
    assert main(given) == 0
    assert "the first 4 samples: in the loss: 80.0% of the tokens; " in capsys.readouterr().out
    assert main([*given, "--samples", "99"]) == 0
    assert "duplicates: 49 (samples 1, 3, 5, ...)" in capsys.readouterr().out
    assert main([*given, "--samples", "1e6"]) == 0
    assert "\nin the loss: 80.0% of the tokens; " in capsys.readouterr().out


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_json_has_the_printed_figures_and_every_skipped_row(
    checkpoint_dir, tmp_path, small, monkeypatch, capsys
):
    monkeypatch.setattr("nopad.packing.pipeline.SMALL_BYTES", small)

    def chat(question: str, answer: str) -> str:
        turns = ("user", question), ("assistant", answer)
        return json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]})

    lines = [chat("a b", "c d"), chat("a", " "), '{"text": "trunc', chat("a b", "c d")]
    lines += ["", '{"body": 1}'] * 30 + [chat("c", "b")]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    report = tmp_path / "report.json"
    given = ["inspect", str(tmp_path / "chats.jsonl"), "--tokenizer", str(checkpoint_dir)]
    given += ["--budget", "64", "--on-error", "skip", "--json", str(report)]
    assert main(given) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"\nreport: {report}\n")
    found = json.loads(report.read_text())
    assert found["skipped"]["count"] == len(found["skipped"]["rows"]) == 31
    places = [row["location"] for row in found["skipped"]["rows"]]
    assert places == [f"chats.jsonl, line {n}" for n in [3, *range(6, 65, 2)]]
    assert "it is truncated" in found["skipped"]["rows"][0]["reason"]
    assert found["empty_answers"] == {"count": 1, "locations": ["chats.jsonl, line 2"]}
    assert found["duplicates"] == {"count": 1, "locations": ["chats.jsonl, line 4"]}
    assert "duplicates: 1 (chats.jsonl, line 4); empty answers: 1 (chats.jsonl, line 2)\n" in out
    assert found["samples"] == found["all_samples"] == found["examined_samples"] == 4
    assert f"4 samples, {found['tokens']} tokens; length: median {found['length']['median']}" in out
    assert f"in the loss: {found['in_the_loss']:.1%} of" in out
    shares = found["tokens_by_role"]["shares"]
    assert f"in 4 chats: {', '.join(f'{r} {s:.1%}' for r, s in shares.items())}\n" in out
    assert sum(each["samples"] for each in found["lengths"]) == 4
    chosen = next(row for row in found["budgets"] if row["budget"] == found["budget"] == 64)
    assert f"{chosen['fill']:.2%}" in out and f"{chosen['padded_fill']:.2%}" in out


def test_samples_of_a_mixture_have_the_lines_of_their_files(tmp_path, monkeypatch, capsys):
    for name, rows in (("a", [[1], [2, 2, 2]]), ("b", [[3, 3], [3, 3], [4, 4, 4, 4]])):
        text = "".join(json.dumps({"input_ids": row}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    given = [f"{tmp_path / name}.jsonl=1" for name in "ab"]
    for small in (1 << 20, 0):  # stored, and streamed
        monkeypatch.setattr("nopad.packing.pipeline.SMALL_BYTES", small)
        assert main(["inspect", *given, "--budget", "16"]) == 0
        out = capsys.readouterr().out
        assert "duplicates: 1 (b.jsonl, line 2)" in out
        assert "longest: 4, 3, 2 tokens (b.jsonl, line 3; a.jsonl, line 2; b.jsonl, line 2)" in out
