"""Rows with images become samples whose tokens are the processor's, and whose labels are text."""

from __future__ import annotations

import io

import numpy as np
import pytest
import tiny_vlm
from nopad.collators import PackedCollator
from nopad.packing import PackedDataset, tokenize
from nopad.packing.encoding.image_encoder import ImageEncoder

KINDS = ["qwen2_5_vl", "smolvlm"]
PLACE = {"qwen2_5_vl": "<|image_pad|>", "smolvlm": "<image>"}


def sample_of(row: dict, kind: str = "qwen2_5_vl", **options):
    (found,) = ImageEncoder(tiny_vlm.processor(kind), **options).encode([row])
    if isinstance(found, ValueError):
        raise found
    return found


def labels_of(sample) -> str:
    return tiny_vlm.tokenizer().decode(sample.labels[sample.labels >= 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_has_the_processors_tokens_and_labels_the_answer(kind):
    row = tiny_vlm.chat("see", tiny_vlm.image(16, 24), "and", tiny_vlm.image(24, 16), answer="ok")
    sample, processor = sample_of(row, kind), tiny_vlm.processor(kind)
    out = processor.apply_chat_template(row["messages"], tokenize=True, return_dict=True)
    assert sample.tokens.tolist() == list(out["input_ids"][0])
    assert labels_of(sample) == "ok<|im_end|>"
    assert np.array_equal(
        sample.images.model_inputs()["pixel_values"], np.asarray(out["pixel_values"])
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add_eos", [False, True])
def test_text_and_completions_with_images_label_text_alone(kind, add_eos):
    place, image = PLACE[kind], tiny_vlm.image(16, 16)
    end = "<|im_end|>" * add_eos
    text = sample_of({"text": f"a {place} b", "images": [image]}, kind, add_eos=add_eos)
    assert labels_of(text) == f"  b{end}"
    pair = {"prompt": f"{place} is", "completion": " a cat", "images": image}
    assert labels_of(sample_of(pair, kind, add_eos=add_eos)) == f" a cat{end}"
    seen = {"prompt": "draw", "completion": f" it {place} so", "images": [image]}
    assert labels_of(sample_of(seen, kind, add_eos=add_eos)) == f" it  so{end}"
    assert PackedCollator()([text])["input_ids"].shape == (1, len(text))


def test_images_are_paths_bytes_arrays_or_pictures(tmp_path):
    picture = tiny_vlm.image(24, 16)
    picture.save(tmp_path / "a.png")
    file = io.BytesIO()
    picture.save(file, "png")
    content = file.getvalue()
    forms = [picture, tmp_path / "a.png", str(tmp_path / "a.png"), content, np.asarray(picture)]
    forms += [{"bytes": content, "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}]
    rows = [tiny_vlm.chat(form, "what?") for form in forms if not isinstance(form, str)]
    rows += [{**tiny_vlm.chat(None, "what?"), "images": [form]} for form in forms]
    found = [sample_of(row).images.model_inputs()["pixel_values"] for row in rows]
    assert all(np.array_equal(found[0], pixels) for pixels in found)


def test_rows_of_text_are_encoded_as_by_the_tokenizer():
    rows = ["plain", {"text": "text"}, {"input_ids": [5, 6]}, {"prompt": "a", "completion": "b"}]
    encoder = ImageEncoder(tiny_vlm.processor())
    tokenizer = tiny_vlm.tokenizer()
    texts = [next(iter(PackedDataset([row], tokenizer=tokenizer, budget=64))) for row in rows]
    for sample, pack in zip(encoder.encode(rows), texts, strict=True):
        assert sample.tokens.tolist() == pack.tokens.tolist()
        assert sample.labels.tolist() == pack.labels.tolist()
        assert sample.images is None


GONE = tiny_vlm.chat("/nowhere/cat.png", "what?")
GONE["messages"][0]["content"][0] = {"type": "image", "path": "/nowhere/cat.png"}
VIDEO = {"messages": [
    {"role": "user", "content": [{"type": "video", "video": "a.mp4"}]},
    {"role": "assistant", "content": "no"},
]}  # fmt: skip
WRONG = [
    (GONE, "image /nowhere/cat.png does not exist"),
    (tiny_vlm.chat(b"no image", "what?"), "image b'no image' cannot be read"),
    ({"text": "<|image_pad|>", "images": ["https://a.b/c.png"]}, "is a URL: download it"),
    ({"text": "no place", "images": [tiny_vlm.image(8, 8)]}, "1 images for 0 places in the text"),
    ({**tiny_vlm.chat(None, None, "x"), "images": [tiny_vlm.image(8, 8)]}, "1 images for 2 places"),
    (VIDEO, "a part of type 'video': pass text and images"),
    ({"input_ids": [5, 6], "images": [tiny_vlm.image(8, 8)]}, "the row has images"),
    ({"input_ids": [5, 6], "pixel_values": [[0.0]]}, "the row has images"),
    ({"text": "<|image_pad|>", "images": [tiny_vlm.image(8, 8)]}, "no text to train on"),
    ({"text": "a <|image_pad|> b"}, "in the row has no image"),
]


@pytest.mark.parametrize(("row", "told"), WRONG)
def test_a_row_that_cannot_be_used_says_why(row, told):
    with pytest.raises(ValueError, match=told):
        sample_of(row, add_eos=False)


def test_a_tokenizer_refuses_images_which_it_would_ignore():
    data = {"tokenizer": tiny_vlm.tokenizer(), "budget": 64}
    data["tokenizer"].chat_template = tiny_vlm.TEMPLATE
    image = tiny_vlm.image(8, 8)
    for row in (
        tiny_vlm.chat(image, "what?"),
        {"text": "a", "images": [image]},
        {"input_ids": [5, 6], "pixel_values": [[0.0]]},
    ):
        with pytest.raises(ValueError, match=r"the row has images: .*tokenizer=AutoProcessor"):
            list(PackedDataset([row], **data))
    with pytest.raises(ValueError, match="the row has images"):
        PackedCollator()([{"input_ids": [5, 6], "pixel_values": [[0.0]]}])
    assert len(list(PackedDataset([{"text": "a", "images": []}], **data))) == 1


def test_settings_that_would_cut_images_are_refused(tmp_path):
    data = {"source": tiny_vlm.chats(), "tokenizer": tiny_vlm.processor()}
    for settings, told in (
        ({"strategy": "concat"}, "splits documents, which may have images"),
        ({"overflow": "truncate"}, 'would cut images: pass "drop"'),
        ({"label_column": "label"}, "heads on models of images are not packed"),
    ):
        with pytest.raises(ValueError, match=told):
            PackedDataset(**data, budget=256, **settings)
    with pytest.raises(ValueError, match="85 tokens"):
        list(PackedDataset(**data, budget=80))
    dropped = PackedDataset(**data, budget=80, overflow="drop")
    assert dropped.report()["dropped"] == 1
    assert {len(pack.tokens) for pack in dropped} == {61, 60, 47, 67}
    with pytest.raises(ValueError, match=r"cannot encode a corpus of tokens"):
        tokenize(tiny_vlm.chats(), tmp_path, tokenizer=tiny_vlm.processor())


def test_a_template_with_generation_markers_is_refused_for_images():
    processor = tiny_vlm.processor()
    processor.chat_template += "{% generation %}{% endgeneration %}"
    (found,) = ImageEncoder(processor).encode([tiny_vlm.chat(tiny_vlm.image(8, 8), "what?")])
    assert "without generation markers" in str(found)


def test_models_that_see_a_prompt_in_both_directions_are_refused():
    """Their token types are 0 for images and the prompt, as in PaliGemma."""

    class BothWays(type(tiny_vlm.processor())):
        def __call__(self, **given):
            out = super().__call__(**given)
            types = out.pop("mm_token_type_ids")
            out["token_type_ids"] = [[0 for _ in row] for row in types]
            return out

    processor = tiny_vlm.processor()
    processor.__class__ = BothWays
    (found,) = ImageEncoder(processor).encode([tiny_vlm.chat(tiny_vlm.image(8, 8), "what?")])
    assert "sees a prompt in both directions" in str(found)
