"""Engines of checkpoints, LoRA adapters and folders that are neither."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from nopad.inference import Engine, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from small_checkpoint import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def generated(model, tokenizer=None, prompt="Hello", **settings) -> list[int]:
    (completion,) = Engine(model, tokenizer, memory=1 << 24, **settings).generate([prompt], GREEDY)
    assert completion.error is None
    return completion.token_ids


def test_a_folder_is_its_model_and_tokenizer(checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    wanted = generated(model, tokenizer)
    assert generated(str(checkpoint)) == generated(checkpoint) == wanted
    assert generated(checkpoint, str(checkpoint)) == generated(checkpoint, tokenizer) == wanted
    engine = Engine(checkpoint, dtype=torch.bfloat16, memory=1 << 24)
    assert {weight.dtype for weight in engine._model.parameters()} == {torch.bfloat16}


def test_a_folder_without_a_tokenizer_takes_ids(checkpoint, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("tokenizer*", "vocab*"))
    assert len(generated(folder, prompt=[1, 2, 3])) == 6
    with pytest.raises(ValueError, match="tokenizer"):
        generated(folder)


def test_an_adapter_is_its_base_model_with_the_adapter(checkpoint, adapter, caplog):
    import peft

    with caplog.at_level(logging.WARNING):
        found = generated(adapter)
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(adapter).merge_and_unload()
    assert found == generated(merged, tokenizer_of(checkpoint)) != generated(checkpoint)
    assert f"{adapter} is an adapter on {checkpoint}" in caplog.text
    assert "merge_and_unload().save_pretrained(FOLDER)" in caplog.text


def tokenizer_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_commands_take_the_folder_of_an_adapter(checkpoint, adapter, capsys):
    from nopad.cli import generate, load_tokenizer

    assert load_tokenizer(str(adapter)).get_vocab() == load_tokenizer(str(checkpoint)).get_vocab()
    argv = [str(adapter), "--prompt", "Hello", "--max-tokens", "6", "--temperature", "0"]
    assert generate.main([*argv, "--ignore-eos"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == generated(adapter)


def test_an_adapter_whose_base_is_not_found_names_it_and_the_way_out(adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "/nowhere/base"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    said = rf"its base model /nowhere/base is not a folder.* base_model_name_or_path in {folder}"
    with pytest.raises(ValueError, match=said):
        Engine(folder)
    with pytest.raises(ValueError, match=said):
        Engine(folder, tokenizer=object())


def test_what_is_not_a_checkpoint_is_told_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"is not a checkpoint: it has no config\.json$"):
        Engine(tmp_path)
    with pytest.raises(ValueError, match=r"^there is no folder \./nowhere$"):
        Engine("./nowhere")
