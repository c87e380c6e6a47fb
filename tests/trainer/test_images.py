"""Images in packs: a model learns from them what it learns from one document at a time."""

from __future__ import annotations

import inspect
from copy import deepcopy

import numpy as np
import pytest
import tiny_run
import tiny_vlm
import torch
import transformers
from front_ends import FIRST_STEP_OF_LM
from nopad.attention.hf.mask_patch import uninstall_mask_patch
from nopad.collators import PackedCollator
from nopad.packing import IGNORE_INDEX, Pack, PackedDataset
from nopad.packing.encoding import Encoder
from nopad.trainer.layers import compile_layers
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring import check_run
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

FAST = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "smolvlm", "gemma3")
KINDS = [
    pytest.param(kind, marks=[] if kind in FAST else [pytest.mark.slow]) for kind in tiny_vlm.TYPES
]
IMAGE_TYPES = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
ENCODER_DECODERS = ("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop",
                    "vision-encoder-decoder")  # fmt: skip
NO_PIXELS = ("diffusion_gemma", "evolla", "kosmos-2.5", "mistral4")
# No tiny model with its processor is built here: the start check of a run examines them.
NOT_BUILT = """
aria aya_vision blip blip-2 chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni
deepseek_ocr2 deepseek_vl deepseek_vl_hybrid emu3 ernie4_5_vl_moe exaone4_5 fast_vlm fuyu gemma3n
gemma4 gemma4_unified git glm46v glm4v glm4v_moe glm5_next glm_ocr glmga got_ocr2 granite4_vision
hunyuan_vl hyperclovax_vision_v2 idefics idefics2 inkling_mm_model instructblip instructblipvideo
internvl janus kimi_k25 kosmos-2 lfm2_vl lighton_ocr llama4 llava llava_next llava_next_video
llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral_large4 mllama
molmo2 muse_glimmer muse_spark nemotron_h_omni ovis2 paddleocr_vl paligemma perception_lm pi0
pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen3_omni_moe_thinker qwen4_exp shieldgemma2
step3p7 unlimited_ocr video_llama_3 video_llava vipllava
"""


def dataset(kind: str, **settings) -> PackedDataset:
    rows = tiny_vlm.chats()
    settings = {"tokenizer": tiny_vlm.processor(kind), "budget": 256, "seed": 3, **settings}
    return PackedDataset(rows, **settings)


def samples(kind: str) -> list:
    encoder: Encoder = dataset(kind).encoder
    found = encoder.encode(tiny_vlm.chats())
    assert not [each for each in found if isinstance(each, ValueError)]
    return found


def one_by_one(model, documents: list) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over all labels and gradient, with the positions that the model itself finds."""
    losses, count = [], 0
    for sample in documents:
        inputs = {"input_ids": torch.from_numpy(sample.tokens)[None]}
        if sample.images is not None:
            alone = sample.images.inputs_alone()
            inputs = {name: torch.from_numpy(value) for name, value in alone.items()}
        labels = torch.from_numpy(sample.labels)[None]
        own = int((labels != IGNORE_INDEX).sum())
        losses.append(model(**inputs, labels=labels, use_cache=False).loss * own)
        count += own
    loss = torch.stack(losses).sum() / count
    loss.backward()
    return loss.item(), gradient(model)


def gradient(model) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("attention", ["nopad", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_learns_from_packed_images_what_it_learns_one_by_one(kind, attention):
    model, documents = tiny_vlm.model(kind, attention), samples(kind)
    stock = deepcopy(model)
    stock.set_attn_implementation("sdpa")
    loss, gold = one_by_one(stock, documents)
    attach_loss(model)
    ours = model(**PackedCollator()(Pack.of(documents, budget=512))).loss
    ours.backward()
    assert ours.item() == pytest.approx(loss, rel=1e-5)
    assert any("vision" in name or "visual" in name for name in gold)
    assert tiny_run.distance(gradient(model), gold) < 2e-5


@pytest.mark.parametrize("front_end", FIRST_STEP_OF_LM)
def test_a_step_with_images_of_every_front_end_is_that_of_its_documents(front_end, tmp_path):
    kind = "qwen2_5_vl"
    model, data = tiny_vlm.model(kind), dataset(kind, budget=128)
    packs = [pack for pack, _ in zip(data, range(2), strict=False)]
    numbers = [number for pack in packs for number in pack.samples.tolist()]
    documents = samples(kind)
    stock = deepcopy(model)
    stock.set_attn_implementation("sdpa")
    _, gold = one_by_one(stock, [documents[number] for number in numbers])
    data.rewind()
    ours = FIRST_STEP_OF_LM[front_end](model, data, tmp_path)
    assert tiny_run.distance({name: ours[name] for name in gold}, gold) < 2e-5


class Faulty(PackedCollator):
    """Gives an image what belongs to its neighbour."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def __call__(self, packs):
        batch = super().__call__(packs)
        if self.name in batch:
            axis = int("pixel_attention_mask" in batch)
            batch[self.name] = batch[self.name].roll(1, axis)
        return batch


@pytest.mark.parametrize("kind", ["qwen2_5_vl", pytest.param("smolvlm", marks=pytest.mark.slow)])
def test_the_start_check_passes_images_and_catches_those_of_a_neighbour(kind):
    model, data = tiny_vlm.model(kind), dataset(kind)
    attach_loss(model)
    assert "leak check 0.0" in check_run(model, data, PackedCollator())[0]
    for name in ["pixel_values", "image_grid_thw"] if "qwen" in kind else ["pixel_values"]:
        with pytest.raises(ValueError, match=r"lets packed samples see each other|differently"):
            check_run(model, data, Faulty(name))


@pytest.mark.slow
def test_the_start_check_catches_positions_of_images_that_are_not_the_models():
    model, data = tiny_vlm.model(), dataset("qwen2_5_vl")
    attach_loss(model)

    class Plain(PackedCollator):
        def __call__(self, packs):
            batch = super().__call__(packs)
            if batch["position_ids"].ndim == 3:
                batch["position_ids"] = batch["position_ids"][0]
            return batch

    with pytest.raises(ValueError, match="computes packed images differently than alone"):
        check_run(model, data, Plain())


def test_the_start_check_catches_a_tower_whose_images_see_each_other():
    model, data = tiny_vlm.model("qwen3_vl"), dataset("qwen3_vl")
    attach_loss(model)

    def as_one_image(_, args, kwargs):
        return args, {**kwargs, "cu_seqlens": kwargs["cu_seqlens"][[0, -1]]}

    for block in model.model.visual.blocks:
        block.attn.register_forward_pre_hook(as_one_image, with_kwargs=True)
    with pytest.raises(ValueError, match="lets packed samples see each other"):
        check_run(model, data, PackedCollator())


def test_the_tower_attends_image_by_image_under_nopad(monkeypatch):
    from nopad.attention.hf import interface

    lengths, stock = [], interface.sdpa_attention_forward
    monkeypatch.setattr(
        interface,
        "sdpa_attention_forward",
        lambda module, query, *given, **options: (
            lengths.append(query.shape[2]) or stock(module, query, *given, **options)
        ),
    )
    model, batch = tiny_vlm.model("qwen3_vl"), PackedCollator()(Pack.of(samples("qwen3_vl"), 512))
    model(**batch)
    patches = batch["image_grid_thw"].prod(1).tolist()
    assert len(set(patches)) > 1
    assert lengths == patches * len(model.model.visual.blocks)


def test_an_attached_loss_runs_all_images_of_a_tower_in_one_call(monkeypatch):
    from nopad.attention.hf import image_attention

    lengths, right = [], image_attention.attend

    def spy(q, k, v, varlen, **options):
        lengths.append(varlen.cu_seqlens.diff().tolist())
        return right(q, k, v, varlen, **options)

    monkeypatch.setattr(image_attention, "attend", spy)
    model, batch = tiny_vlm.model("qwen3_vl"), PackedCollator()(Pack.of(samples("qwen3_vl"), 512))
    loss = attach_loss(model)
    model(**batch)
    patches = batch["image_grid_thw"].prod(1).tolist()
    assert lengths == [patches] * len(model.model.visual.blocks)
    loss.detach()
    assert model.config.vision_config._attn_implementation == "nopad"


def test_a_model_without_images_is_refused_with_a_processor():
    model, data = tiny_run.model(), dataset("qwen2_5_vl", budget=128)
    model.config.max_position_embeddings = 128
    attach_loss(model)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM takes no images: pass .* tokenizer"):
        check_run(model, data)


def test_attention_that_ignores_how_images_see_themselves_is_refused():
    model = tiny_vlm.model("gemma3", "sdpa")
    model.config.get_text_config()._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"Gemma3.* which flash_attention_2 ignores: load it with"):
        check_run(model, dataset("gemma3"))


def test_images_that_see_themselves_do_so_without_a_trainer():
    """In the first forward of a model without an attached loss, and in later ones."""
    model = tiny_vlm.model("gemma3")
    stock = deepcopy(model)
    stock.set_attn_implementation("sdpa")
    sample = samples("gemma3")[0]
    inputs = {k: torch.from_numpy(v) for k, v in sample.images.inputs_alone().items()}
    causal = {k: v for k, v in inputs.items() if k != "token_type_ids"}
    uninstall_mask_patch()
    gold = stock(**inputs).logits
    for _ in range(2):
        torch.testing.assert_close(model(**inputs, use_cache=False).logits, gold)
    assert (model(**causal, use_cache=False).logits - gold).abs().max() > 1e-3


@pytest.mark.slow
def test_compiled_layers_see_images_in_both_directions():
    model, documents = tiny_vlm.model("gemma3"), samples("gemma3")
    stock = deepcopy(model)
    stock.set_attn_implementation("sdpa")
    loss, gold = one_by_one(stock, documents)
    attach_loss(model)
    count, graphs = CompileCounterWithBackend("aot_eager"), []
    compile_layers(model, backend=count)
    for pack in (documents[2:], documents[1:2], documents):  # with images, without, with images
        ours = model(**PackedCollator()(Pack.of(pack, budget=512))).loss
        graphs.append(count.frame_count)
    assert graphs == [2, 4, 4], "each kind of layer has a graph with images, and one without"
    ours.backward()
    assert ours.item() == pytest.approx(loss, rel=1e-5)
    assert tiny_run.distance(gradient(model), gold) < 2e-5


def test_every_other_type_has_its_reason():
    listed = {*ENCODER_DECODERS, *NO_PIXELS, *NOT_BUILT.split()}
    assert {*IMAGE_TYPES} - {*tiny_vlm.TYPES} <= listed
    assert not listed & {*tiny_vlm.TYPES}
    for kinds, name, has in (
        (ENCODER_DECODERS, "decoder_input_ids", True),
        (NO_PIXELS, "pixel_values", False),
    ):
        for kind in {*kinds} & {*IMAGE_TYPES}:
            forward = getattr(transformers, IMAGE_TYPES[kind]).forward
            assert (name in inspect.signature(forward).parameters) is has, kind


def test_workers_make_the_same_pixels(tmp_path):
    from nopad.trainer.data.loader import PackedLoader

    batches = [list(PackedLoader(dataset("smolvlm", budget=128), num_workers=n)) for n in (0, 2)]
    assert len(batches[0]) > 1
    for ours, theirs in zip(*batches, strict=True):
        assert set(ours) == set(theirs)
        for name, value in ours.items():
            assert np.array_equal(np.asarray(value), np.asarray(theirs[name])), name


def test_a_validation_set_has_images_like_the_training_set():
    from nopad.trainer.data.plain_data import pack_like

    data = pack_like(dataset("smolvlm"), tiny_vlm.chats())
    assert sum(each is not None for pack in data for each in pack.images) == 3
