"""A checkpoint that is torn or damaged is never taken for a whole one."""

from __future__ import annotations

import random

import pytest
import tiny_run
import torch
from nopad.trainer.checkpoint_manifest import (
    MANIFEST,
    check_archive,
    find_damage,
    latest_intact_checkpoint,
    remove_manifest,
    write_manifest,
)
from nopad.trainer.data import PackedLoader, save_data_state
from nopad.trainer.data.data_state import STATE_FILE


@pytest.fixture
def folder(tmp_path):
    for step in (2, 9, 10):
        checkpoint = tmp_path / f"checkpoint-{step}"
        save_data_state(PackedLoader(tiny_run.dataset()), checkpoint)
        (checkpoint / "model.safetensors").write_bytes(bytes(range(256)))
        write_manifest(checkpoint)
    return tmp_path


def damages(whole: bytes, flips: int) -> list[bytes]:
    """The file at every shorter length, and with single bits turned over."""
    draw = random.Random(0)
    bad = [whole[:length] for length in range(len(whole))]
    for _ in range(flips):
        place, bit = draw.randrange(len(whole)), 1 << draw.randrange(8)
        bad.append(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
    return bad


@pytest.mark.parametrize("name", [STATE_FILE, MANIFEST, "model.safetensors"])
def test_every_torn_length_and_every_flipped_bit_is_noticed(folder, name):
    assert latest_intact_checkpoint(folder).name == "checkpoint-10"
    path = folder / "checkpoint-10" / name
    for bad in damages(path.read_bytes(), 1000):
        path.write_bytes(bad)
        assert latest_intact_checkpoint(folder).name == "checkpoint-9"
    path.unlink()
    assert latest_intact_checkpoint(folder).name == "checkpoint-9"


def test_without_a_whole_one_every_reason_is_named(folder):
    (folder / "checkpoint-2" / MANIFEST).unlink()
    (folder / "checkpoint-9" / STATE_FILE).write_text("{}")
    (folder / "checkpoint-10" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no whole checkpoint") as error:
        latest_intact_checkpoint(folder)
    for part in ("checkpoint-10: model.safetensors is missing", "cut short",
                 "checkpoint-9: nopad_data.json is torn or damaged"):  # fmt: skip
        assert part in str(error.value)


def test_a_folder_may_be_sealed_again_and_again(folder):
    checkpoint = folder / "checkpoint-10"
    for weights in (b"a", b"b", b"c"):
        (checkpoint / "model.safetensors").write_bytes(weights)
        write_manifest(checkpoint)
        assert find_damage(checkpoint) is None


def test_a_checkpoint_that_is_written_again_is_not_whole_until_it_is_sealed(folder):
    checkpoint = folder / "checkpoint-10"
    for _ in range(2):
        write_manifest(checkpoint)
    remove_manifest(checkpoint)
    assert "cut short" in str(find_damage(checkpoint))
    remove_manifest(folder / "checkpoint-11")  # the first time there is nothing to remove_manifest


def test_large_files_are_known_by_their_size(folder, monkeypatch):
    monkeypatch.setattr("nopad.trainer.checkpoint_manifest.HASHED_UP_TO", 100)
    checkpoint = folder / "checkpoint-10"
    write_manifest(checkpoint)
    assert find_damage(checkpoint) is None
    (checkpoint / "model.safetensors").write_bytes(bytes(255))
    assert find_damage(checkpoint) == "model.safetensors is torn or damaged"


def test_a_torn_or_damaged_archive_is_refused_by_name(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({"weights": torch.arange(64.0), "position": {"epoch": 1}}, path)
    check_archive(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 11):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"last\.ckpt is no whole checkpoint"):
            check_archive(path)
    place = whole.index(torch.arange(64.0).numpy().tobytes()) + 77
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    with pytest.raises(ValueError, match="is damaged in it"):
        check_archive(path)
