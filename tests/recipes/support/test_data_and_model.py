"""The data and models that recipes load: what the options say, and nothing else."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch
from nopad.recipes import pretrain, sft
from nopad.recipes.support import data_and_model, run_recipe, stdlib_corpus


def pretrain_args(folder: Path, data: Path, *more: str):
    argv = ["--data", data, "--tokenizer", small_inputs.tokenizer(folder), "--budget", "64", *more]
    return pretrain.parse_args([*map(str, argv)])


def sft_argv(folder: Path, data: Path) -> list[str]:
    small_inputs.model(folder)
    argv = ["--data", data, folder / "model", "--budget", "64"]
    return [*map(str, [*argv, "--tokenizer", small_inputs.tokenizer(folder)])]


def test_a_bad_row_stops_a_recipe_with_the_option_that_leaves_it_out(tmp_path, capsys):
    data = small_inputs.texts(tmp_path)
    complete = [pack.tokens.tolist() for pack in islice(_packs(pretrain_args(tmp_path, data)), 9)]
    lines = data.read_text().splitlines(keepends=True)
    data.write_text("".join([*lines[:7], '{"text": ""}\n', *lines[7:]]))
    status = _status(lambda *_: _packs(pretrain_args(tmp_path, data)))
    message = capsys.readouterr().err
    assert status == 2 and "texts.jsonl, line 8: text is empty" in message
    assert "(pass --on-error skip to skip and count such rows)" in message
    packs = _packs(pretrain_args(tmp_path, data, "--on-error", "skip"))
    assert [pack.tokens.tolist() for pack in islice(packs, 9)] == complete


def _status(train) -> int:
    """Return the exit status of a recipe that does this."""
    return run_recipe.exit_status("pretrain", pretrain.parse_args, train, [])


def _packs(args):
    return data_and_model.load_data(args)[1]


def test_a_glob_chooses_among_the_files_of_a_folder(tmp_path):
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    small_inputs.texts(inputs)
    (inputs / "LICENSE").write_text("All rights reserved.")
    with pytest.raises(ValueError, match="choose some with glob="):
        _packs(pretrain_args(tmp_path, inputs))
    assert _packs(pretrain_args(tmp_path, inputs, "--glob", "*.jsonl")).count() > 1


def test_flat_tokens_are_packed_as_they_are(tmp_path):
    np.array([5, 6, 101, 7, 8, 9, 101], np.uint16).tofile(tmp_path / "flat.bin")
    packs = _packs(pretrain_args(tmp_path, tmp_path / "flat.bin", "--dtype", "uint16"))
    assert sorted(next(iter(packs)).lengths.tolist()) == [3, 4]
    other = _packs(
        pretrain_args(tmp_path, tmp_path / "flat.bin", "--dtype", "uint16", "--add-eos", "6")
    )
    assert sorted(next(iter(other)).lengths.tolist()) == [2, 5]


def test_fine_tuning_reads_data_by_the_same_options(tmp_path):
    data = small_inputs.chats(tmp_path)
    data.write_text(data.read_text() + '{"messages": []}\n')
    argv = sft_argv(tmp_path, data)
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 81"):
        sft.load_data(sft.parse_args(argv))
    _, packs, _ = sft.load_data(sft.parse_args([*argv, "--on-error", "skip"]))
    assert packs.skipped.rows == 1


def test_fine_tuning_takes_a_stream_on_several_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nopad.packing.pipeline.SMALL_BYTES", 0)
    argv = sft_argv(tmp_path, small_inputs.chats(tmp_path))
    with monkeypatch.context() as ranks:
        ranks.setenv("RANK", "1")
        ranks.setenv("WORLD_SIZE", "2")
        _, packs, _ = sft.load_data(sft.parse_args(argv))
        assert [pack.index for pack in islice(packs, 3)] == [1, 3, 5]
    assert _status(lambda *_: _count_steps(packs)) == 2
    assert "pass --steps, the number of steps to train" in capsys.readouterr().err


def _count_steps(packs) -> None:
    from nopad.trainer.with_hf.epochs import set_epochs
    from transformers import TrainingArguments

    set_epochs(TrainingArguments(num_train_epochs=1.0), packs)


def test_fine_tuning_takes_the_column_that_its_errors_speak_of(tmp_path, capsys):
    path = tmp_path / "stories.jsonl"
    path.write_text('{"story": "w1 w2 w3"}\n' * 9)
    argv = sft_argv(tmp_path, path)
    assert _status(lambda *_: sft.load_data(sft.parse_args(argv))) == 2
    assert "name the text's column with --text-column" in capsys.readouterr().err
    argv += ["--text-column", "story"]
    assert _status(lambda *_: sft.load_data(sft.parse_args(argv))) == 0


def test_the_standard_library_is_read_only_where_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib_corpus, "documents", None)
    path = tmp_path / "texts.jsonl"
    texts = [f"w{number} " + "w1 w2 w3 w4 w5 " * 20 for number in range(400)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    _, packs, examples = data_and_model.load_data(pretrain_args(tmp_path, path))
    assert examples and next(iter(packs))


@pytest.mark.parametrize("recipe", [pretrain, sft])
def test_a_model_that_is_nowhere_is_told_plainly(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = small_inputs.chats(tmp_path)
    args = recipe.parse_args(["./nomodel", "--data", str(data)])
    with pytest.raises(ValueError, match=r"^there is no folder \./nomodel$"):
        (sft if recipe is sft else data_and_model).load_data(args)
    with pytest.raises(ValueError, match=r"^there is no folder \./nomodel$"):
        sft.load_model(args) if recipe is sft else data_and_model.load_model(args, None)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weights_are_read_in_both_file_formats(file, tmp_path):
    args, trained = _checkpoint(tmp_path, file)
    loaded = data_and_model.load_model(args, [])
    assert torch.equal(*(model.get_input_embeddings().weight for model in (loaded, trained)))


UNREADABLE = [
    "consolidated.00.pth",
    "tf_model.h5",
    "flax_model.msgpack",
    "model.gguf",
    "last.ckpt",
    "model.onnx",
    "__0_0.distcp",
    "pytorch_model_fsdp_0/__0_0.distcp",
]


@pytest.mark.parametrize("file", UNREADABLE)
def test_weights_that_cannot_be_read_are_not_replaced_by_new_ones(file, tmp_path):
    args, _ = _checkpoint(tmp_path, file)
    with pytest.raises(ValueError, match=r"no file named model\.safetensors, or pytorch_model"):
        data_and_model.load_model(args, [])


def test_weights_that_are_listed_but_missing_are_not_replaced_by_new_ones(tmp_path):
    args, trained = _checkpoint(tmp_path, "model.safetensors")
    (Path(args.model) / "model.safetensors").unlink()
    trained.save_pretrained(args.model, max_shard_size="20KB")
    for shard in Path(args.model).glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(ValueError, match=r"No such file or directory: .*-00001-of-.*\.safetensors"):
        data_and_model.load_model(args, [])


def _checkpoint(folder: Path, file: str):
    """Arguments that name a checkpoint with its weights in this file, and the model itself."""
    path = small_inputs.model(folder).parent
    args = pretrain_args(folder, small_inputs.texts(folder), str(path))
    trained = data_and_model.load_model(args, [])  # a config alone: new weights
    if file.endswith("safetensors"):
        trained.save_pretrained(path)
    else:
        (path / file).parent.mkdir(exist_ok=True)
        torch.save(trained.state_dict(), path / file)
    return args, trained
