"""Checkpoints, tokenizers and devices that a user names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import warm_python
from nopad.cli import load_pretrained
from nopad.inference.pretrained import loading


def test_a_tokenizer_may_lie_at_home(checkpoint_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(checkpoint_dir.parent))
    assert len(load_pretrained.load_tokenizer(f"~/{checkpoint_dir.name}"))
    with pytest.raises(ValueError, match="~: has no readable tokenizer"):
        load_pretrained.load_tokenizer("~")


def test_a_tokenizer_that_cannot_be_reached_is_no_such_folder(
    monkeypatch,
):
    def unreachable(path, **options):
        raise OSError("couldn't find it in the cached files.\nCheck your connection.")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", unreachable)
    message = r"^owner/name: couldn't find it .* files; there is no folder owner/name here either$"
    with pytest.raises(ValueError, match=message):
        load_pretrained.load_tokenizer("owner/name")


@pytest.mark.parametrize(
    ("name", "kind"), [("config.json", "file"), ("./made", "folder"), ("a/b/c", "folder")]
)
def test_a_path_that_is_nowhere_is_not_asked_of_the_hub(name, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^there is no {kind} {name}$"):
        load_pretrained.resolve_path(name)
    assert load_pretrained.resolve_path("owner/name") == "owner/name"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("No such thing:\n\n  field 'a' is 3\nmore"), "No such thing: field 'a' is 3"),
        (OSError("gone\nfor good"), "gone"),
        (TypeError("'NoneType' is no list"), "TypeError: 'NoneType' is no list"),
        (MemoryError(), "MemoryError"),
        (ValueError(), "ValueError"),
    ],
)
def test_an_error_is_told_in_one_line_that_says_something(error, line):
    assert load_pretrained.short_error(error) == line


@pytest.mark.parametrize(("name", "rank", "index"), [("cuda:1", "0", 1), (None, "2", 2)])
def test_the_device_of_a_model_is_the_current_one(monkeypatch, name, rank, index):
    """Kernels launched without a device run on the current one."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert loading.choose_device(name) == torch.device("cuda", index)
    assert current == [torch.device("cuda", index)]


CODE = "import pathlib\npathlib.Path({mark!r}).touch()\n"


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["doctor"], ["inspect"]])
def test_code_of_a_checkpoint_is_never_run_and_nobody_is_asked(tmp_path, command):
    """Transformers asks on standard input, unless it is told not to; `yes` answers."""
    mark, folder = tmp_path / "ran", tmp_path / "model"
    folder.mkdir()
    names = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": "code.T"}
    config = {"model_type": "ours", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", None]}})
    )
    (folder / "model.safetensors").touch()
    (folder / "code.py").write_text(CODE.format(mark=str(mark)))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    name, *options = command
    given = [str(rows), "--tokenizer", str(folder)] if name == "inspect" else [str(folder)]
    run = ["-m", "nopad", name, *given, *options]
    done = warm_python.run(run, input="y\n" * 9, timeout=300)
    assert done.returncode == 2 and not mark.exists(), done.stderr
    assert "[y/N]" not in done.stdout
    assert "it needs Python code that comes with it, which nopad never runs" in done.stderr


def copied(checkpoint_dir: Path, tmp_path: Path, **changes: object) -> Path:
    """A copy of the checkpoint whose config differs."""
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_weights_that_are_missing_are_not_filled_at_random(checkpoint_dir, tmp_path):
    layers = json.loads((checkpoint_dir / "config.json").read_text())["num_hidden_layers"] + 1
    folder = copied(checkpoint_dir, tmp_path, num_hidden_layers=layers, layer_types=None)
    message = r"^cannot load .*: \d+ of its weights are missing and would be random, such as model"
    with pytest.raises(ValueError, match=message):
        load_pretrained.load_model(str(folder))


def test_weights_of_other_shapes_than_the_config_says_are_named(checkpoint_dir, tmp_path):
    width = json.loads((checkpoint_dir / "config.json").read_text())["intermediate_size"] + 8
    folder = copied(checkpoint_dir, tmp_path, intermediate_size=width)
    message = rf"have other shapes than its config.json .*mlp.down_proj.weight: .* {width}\]$"
    with pytest.raises(ValueError, match=message):
        load_pretrained.load_model(str(folder))


@pytest.mark.parametrize(
    "kind", [{}, {"use_dora": True}, {"trainable_token_indices": [2, 3]}, {"use_rslora": True}]
)
def test_the_folder_of_an_adapter_is_its_model_with_the_adapter(checkpoint_dir, tmp_path, kind):
    """Embeddings are tied: tokens that an adapter trains change the LM head, too."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = load_pretrained.load_model(str(checkpoint_dir))
    base.config.tie_word_embeddings = True
    base.tie_weights()
    base.save_pretrained(tmp_path / "base")
    model = load_pretrained.load_model(str(tmp_path / "base"))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    ids = torch.tensor([[1, 2, 3, 4]])
    before = model(ids).logits
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **kind)
    adapted = peft.get_peft_model(model, config)
    for name, weight in adapted.named_parameters():
        if "magnitude" in name or "delta" in name:
            weight.data.mul_(1.5)
    adapted.save_pretrained(tmp_path / "lora")
    loaded = load_pretrained.load_model(str(tmp_path / "lora"))
    logits = loaded(ids).logits
    assert torch.allclose(logits, adapted(ids).logits, atol=1e-5)
    assert not torch.allclose(logits, before, atol=1e-2)


def test_an_adapter_that_lacks_weights_or_cannot_run_here_is_refused(checkpoint_dir, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from safetensors.torch import load_file, save_file

    def save(config):
        model = load_pretrained.load_model(str(checkpoint_dir))
        peft.get_peft_model(model, config).save_pretrained(tmp_path)

    save(peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="PromptTuningConfig"):
        load_pretrained.load_model(str(tmp_path))
    save(peft.LoraConfig(target_modules=["q_proj"]))
    weights = load_file(tmp_path / "adapter_model.safetensors")
    weights.pop(next(iter(weights)))
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"weights of the adapter would be random: .*lora_A"):
        load_pretrained.load_model(str(tmp_path))


def test_a_folder_of_checkpoints_says_which_one(checkpoint_dir, tmp_path):
    for step in (5, 10):
        shutil.copytree(checkpoint_dir, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "config.json").write_text("{}")  # its weights were not written
    with pytest.raises(
        ValueError, match=r"no config\.json; its newest checkpoint is \S+/checkpoint-10$"
    ):
        load_pretrained.checkpoint_path(str(tmp_path))


@pytest.mark.parametrize("name", ["", "~nobody-of-that-name/x"])
def test_an_odd_name_is_told_in_one_line(name):
    with pytest.raises(ValueError, match=r"^(the name is empty|there is no folder ~nobody)"):
        load_pretrained.checkpoint_path(name)


@pytest.mark.parametrize("name", ["meta", "xla"])
def test_a_device_that_is_not_here_is_told(name):
    with pytest.raises(ValueError, match=f"^device={name}: this machine cannot use it; pass cpu"):
        loading.choose_device(name)


def test_a_broken_config_is_not_taken_for_a_missing_tokenizer(checkpoint_dir, tmp_path):
    folder = copied(checkpoint_dir, tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"has no readable tokenizer \(.*config\.json"):
        load_pretrained.load_tokenizer(str(folder))
    with pytest.raises(ValueError, match="is a file: pass the folder of a tokenizer"):
        load_pretrained.load_tokenizer(str(folder / "config.json"))
