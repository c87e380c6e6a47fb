"""A truncated or corrupted checkpoint is never taken for an intact one."""

from __future__ import annotations

import random

import pytest
import tiny_run
import torch
from nopad.trainer.checkpoint_manifest import (
    MANIFEST_NAME,
    check_archive,
    find_damage,
    find_manifest,
    latest_intact_archive,
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


def damages(intact: bytes, flips: int) -> list[bytes]:
    """The file at every shorter length, and with single flipped bits."""
    draw = random.Random(0)
    bad = [intact[:length] for length in range(len(intact))]
    for _ in range(flips):
        index, bit = draw.randrange(len(intact)), 1 << draw.randrange(8)
        bad.append(intact[:index] + bytes([intact[index] ^ bit]) + intact[index + 1 :])
    return bad


@pytest.mark.parametrize("name", [STATE_FILE, MANIFEST_NAME, "model.safetensors"])
def test_every_truncation_and_every_flipped_bit_is_noticed(folder, name):
    assert latest_intact_checkpoint(folder).name == "checkpoint-10"
    path = folder / "checkpoint-10" / name
    for bad in damages(path.read_bytes(), 200):
        path.write_bytes(bad)
        assert latest_intact_checkpoint(folder).name == "checkpoint-9"
    path.unlink()
    assert latest_intact_checkpoint(folder).name == "checkpoint-9"


def test_without_an_intact_checkpoint_every_reason_is_named(folder):
    (folder / "checkpoint-2" / MANIFEST_NAME).unlink()
    (folder / "checkpoint-9" / STATE_FILE).write_text("{}")
    (folder / "checkpoint-10" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no intact checkpoint") as error:
        latest_intact_checkpoint(folder)
    for reason in ("checkpoint-10: model.safetensors is missing", "interrupted",
                   "checkpoint-9: nopad_data.json is truncated or corrupted"):  # fmt: skip
        assert reason in str(error.value)


def test_a_manifest_may_be_written_again_and_again(folder):
    checkpoint = folder / "checkpoint-10"
    for weights in (b"a", b"b", b"c"):
        (checkpoint / "model.safetensors").write_bytes(weights)
        write_manifest(checkpoint)
        assert find_damage(checkpoint) is None


def test_a_checkpoint_is_incomplete_while_it_is_written_again(folder):
    checkpoint = folder / "checkpoint-10"
    for _ in range(2):
        write_manifest(checkpoint)
    remove_manifest(checkpoint)
    assert "interrupted" in str(find_damage(checkpoint))
    remove_manifest(folder / "checkpoint-11")  # the first time there is none


def test_large_files_are_known_by_their_size(folder, monkeypatch):
    monkeypatch.setattr("nopad.trainer.checkpoint_manifest.HASHED_UP_TO", 100)
    checkpoint = folder / "checkpoint-10"
    write_manifest(checkpoint)
    assert find_damage(checkpoint) is None
    (checkpoint / "model.safetensors").write_bytes(bytes(255))
    assert find_damage(checkpoint) == "model.safetensors is truncated or corrupted"


def test_a_truncated_or_corrupted_archive_is_refused_by_name(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({"weights": torch.arange(64.0), "position": {"epoch": 1}}, path)
    check_archive(path)
    intact = path.read_bytes()
    for length in range(0, len(intact), 11):
        path.write_bytes(intact[:length])
        with pytest.raises(ValueError, match=r"last\.ckpt is not an intact checkpoint"):
            check_archive(path)
    index = intact.index(torch.arange(64.0).numpy().tobytes()) + 77
    path.write_bytes(intact[:index] + bytes([intact[index] ^ 4]) + intact[index + 1 :])
    with pytest.raises(ValueError, match="in it is damaged"):
        check_archive(path)


def test_a_checkpoint_whose_manifest_was_removed_is_unfinished(folder):
    checkpoint = folder / "checkpoint-10"
    remove_manifest(checkpoint)
    assert find_manifest(checkpoint) is None and "interrupted" in str(find_damage(checkpoint))


def archives(folder, **steps: int) -> None:
    for name, step in steps.items():
        checkpoint = {"global_step": step, "state_dict": {"w": torch.arange(5000.0)}}
        torch.save(checkpoint, folder / f"{name.replace('_', '=')}.ckpt")


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_torn_archive_is_skipped_for_the_intact_one_beside_it(part, tmp_path, capsys):
    archives(tmp_path, last=8, step_8=8, step_4=4)
    assert latest_intact_archive(tmp_path) == tmp_path / "last.ckpt"
    data = (tmp_path / "last.ckpt").read_bytes()
    (tmp_path / "last.ckpt").write_bytes(data[: int(part * len(data))])
    assert latest_intact_archive(tmp_path) == tmp_path / "step=8.ckpt"
    said = capsys.readouterr().out
    assert "step=8.ckpt, step 8; " in said and "last.ckpt is not an intact checkpoint" in said


def test_the_intact_archive_of_the_highest_step_is_taken(tmp_path):
    archives(tmp_path, last=4, step_8=8)
    assert latest_intact_archive(tmp_path) == tmp_path / "step=8.ckpt"
    data = bytearray((tmp_path / "step=8.ckpt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "step=8.ckpt").write_bytes(data)
    assert latest_intact_archive(tmp_path) == tmp_path / "last.ckpt"
    (tmp_path / "last.ckpt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no intact checkpoint; .*last\.ckpt is.*step=8\.ckpt is"):
        latest_intact_archive(tmp_path)
