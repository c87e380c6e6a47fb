"""Images travel with their samples: through packs, a resume and the positions of M-RoPE."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_vlm
import torch
import transformers
from nopad.collators import PackedCollator
from nopad.packing import PackedDataset, Packer
from nopad.packing.images import mrope_positions
from PIL import Image

KINDS = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_those_of_the_model(kind):
    rng = np.random.default_rng(0)
    model_class = getattr(transformers, KINDS[kind] + "Model")
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=4)
    stub = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    stub.get_vision_position_ids = model_class.get_vision_position_ids.__get__(stub)
    for _ in range(20):
        grids = np.stack([np.ones(3, int), *(2 * rng.integers(1, 6, (2, 3)))], axis=1)
        types = [0] * int(rng.integers(1, 4))
        for _, rows, columns in grids.tolist():
            types += [1] * (rows * columns // 4) + [0] * int(rng.integers(1, 4))
        theirs, _ = model_class.get_rope_index(
            stub, torch.zeros(1, len(types), dtype=torch.int64), torch.tensor([types]),
            image_grid_thw=torch.from_numpy(grids),
        )  # fmt: skip
        assert mrope_positions(types, grids, merge=2).tolist() == theirs[:, 0].tolist()


def test_positions_restart_in_every_sample_and_images_follow_their_samples():
    data = PackedDataset(tiny_vlm.chats(), tokenizer=tiny_vlm.processor(), budget=512)
    (pack,) = data
    batch, start, patches = PackedCollator(pad_to_budget=True)(pack), 0, 0
    assert batch["position_ids"].shape == (4, 1, 512)
    assert pack.labels[np.isin(pack.tokens, data.encoder.processor.image_token_id)].max() == -100
    for images, length in zip(pack.images, pack.lengths.tolist(), strict=True):
        positions = batch["position_ids"][:, 0, start : start + length]
        assert positions[0].tolist() == list(range(length))
        if images is None:
            assert (positions == positions[0]).all()
        else:
            own = images.model_inputs()
            assert positions[1:].tolist() == own["position_ids"].tolist()
            rows = batch["pixel_values"][patches : patches + len(own["pixel_values"])]
            assert np.array_equal(rows, own["pixel_values"])
            patches += len(rows)
        start += length
    assert patches == len(batch["pixel_values"])


def contents(packs) -> list[dict]:
    """The batches of packs, as values that can be compared."""
    batches = map(PackedCollator(), packs)
    return [{name: np.asarray(each).tolist() for name, each in b.items()} for b in batches]


@pytest.mark.parametrize("pretokenize", [True, False])
def test_a_resume_has_the_same_images_and_a_state_without_pixels(pretokenize, tmp_path):
    rows = [row for seed in range(4) for row in tiny_vlm.chats()]
    for number, row in enumerate(rows):
        row["messages"].insert(0, {"role": "system", "content": f"row {number}"})
    settings = {"tokenizer": tiny_vlm.processor(), "budget": 256, "pretokenize": pretokenize}
    settings |= {} if pretokenize else {"shards": 2, "pool": 4}
    packs = list(PackedDataset(rows, **settings))
    assert len(packs) > 4
    data = PackedDataset(rows, **settings)
    reader = iter(data)
    begun = [next(reader) for _ in range(3)]
    state = json.dumps(data.state_dict())
    assert len(state) < 4000
    resumed = PackedDataset(rows, **settings)
    resumed.load_state_dict(json.loads(state))
    assert contents([*begun, *resumed]) == contents(packs)


def test_a_state_of_other_images_or_another_processor_is_refused():
    rows, processor = tiny_vlm.chats(), tiny_vlm.processor()
    data = PackedDataset(rows, tokenizer=processor, budget=256)
    next(iter(data))
    others = [tiny_vlm.chat(tiny_vlm.image(16, 24, 9), "what?", answer="a cat"), *rows[1:]]
    with pytest.raises(ValueError):
        PackedDataset(others, tokenizer=processor, budget=256).load_state_dict(data.state_dict())
    processor.image_processor.image_mean = [0.0, 0.0, 0.0]
    other = PackedDataset(rows, tokenizer=processor, budget=256)
    with pytest.raises(ValueError, match="processor"):
        other.load_state_dict(data.state_dict())


def test_a_file_that_changed_after_its_tokens_were_counted_is_refused(tmp_path):
    path = tmp_path / "cat.png"
    tiny_vlm.image(16, 24).save(path)
    data = PackedDataset([tiny_vlm.chat(path, "?")], tokenizer=tiny_vlm.processor(), budget=64)
    Image.new("RGB", (64, 64)).save(path)
    with pytest.raises(ValueError, match="a file of an image was changed"):
        PackedCollator()(next(iter(data)))


def test_a_sample_with_images_is_never_cut():
    (sample,) = PackedDataset(
        tiny_vlm.chats()[:1], tokenizer=tiny_vlm.processor(), budget=64
    ).encoder.encode(tiny_vlm.chats()[:1])
    for overflow in ("split", "truncate"):
        packer = Packer(budget=32, overflow=overflow)
        with pytest.raises(ValueError, match=r"61 tokens, and \d+ of them would be cut"):
            [*packer.add([sample]), *packer.finish()]
        with pytest.raises(ValueError, match="would be cut"):
            list(PackedDataset([sample], budget=32, overflow=overflow, pretokenize=True))
    with pytest.raises(ValueError, match="samples with images can only be dropped"):
        list(PackedDataset(tiny_vlm.chats()[:1], tokenizer=tiny_vlm.processor(), budget=32))
    assert len(list(PackedDataset([sample], budget=64))) == 1


def test_columns_of_datasets_keep_their_images_encoded(tmp_path):
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageColumn

    tiny_vlm.image(16, 24).save(tmp_path / "a.png")
    features = Features({"text": Value("string"), "images": List(ImageColumn())})
    table = {"text": ["a <|image_pad|> b"] * 2, "images": [[str(tmp_path / "a.png")]] * 2}
    rows = Dataset.from_dict(table, features=features)
    for source, settings in ((rows, {}), (rows.to_iterable_dataset(), {"shards": 1})):
        data = PackedDataset(source, tokenizer=tiny_vlm.processor(), budget=64, **settings)
        (pack,) = data
        assert pack.images[0].references[0]["path"].endswith("a.png")
        assert PackedCollator()(pack)["image_grid_thw"].tolist() == [[1, 4, 6]] * 2
