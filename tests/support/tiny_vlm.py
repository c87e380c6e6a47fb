"""Tiny vision-language models, their processors, and chats with images of several sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN_SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
IDEFICS_SPECIAL = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
GEMMA_ROLES = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>",
               "eoi_token": "<end_of_image>"}  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *QWEN_SPECIAL, *IDEFICS_SPECIAL, *TILES,
           *GEMMA_ROLES.values()]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}PLACE{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
M_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
QWEN = {
    "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe",
}  # fmt: skip
TYPES = (*QWEN, "smolvlm", "idefics3", "gemma3")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}  # fmt: skip
HYBRID = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def tokenizer(**roles: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes; roles: tokens that a processor asks for by name."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate([*letters, *SPECIAL])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[3:],
        model_input_names=["input_ids", "attention_mask"],
        **({"extra_special_tokens": roles} if roles else {}),
    )


def processor(model_type: str = "qwen2_5_vl"):
    """Its video processor would need torchvision, and is never called."""
    is_qwen = model_type.startswith("qwen")
    shared = {name: "Qwen3VL" for name in QWEN if name.startswith("qwen3")}
    name = (QWEN | shared | {"gemma3": "Gemma3"}).get(model_type, "Idefics3") + "Processor"
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    kind = type(name, (getattr(transformers, name),), unchecked)
    place = "<|vision_start|><|image_pad|><|vision_end|>" if is_qwen else "<image>"
    place = GEMMA_ROLES["boi_token"] if model_type == "gemma3" else place
    template = TEMPLATE.replace("PLACE", place)
    if is_qwen:
        images = transformers.Qwen2VLImageProcessorPil(
            patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=64, max_pixels=64 * 40
        )
        return kind(images, tokenizer(), chat_template=template)
    if model_type == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        roles = {"tokenizer": tokenizer(**GEMMA_ROLES), "image_seq_length": 4}
        return kind(images, **roles, chat_template=template)
    try:
        images = transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
        )
    except ImportError:
        pytest.skip(reason="before Transformers 5.22, this processor needs torchvision")
    return kind(images, tokenizer(), image_seq_len=4, chat_template=template)


def model(model_type: str = "qwen2_5_vl", attention="nopad"):
    import nopad.attention  # noqa: F401

    torch.manual_seed(0)
    ids = tokenizer().convert_tokens_to_ids
    text = {**TEXT, "vocab_size": len(tokenizer())}
    common = {"attn_implementation": attention}
    if model_type in ("smolvlm", "idefics3"):
        name = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[model_type]
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
        config = getattr(transformers, name + "Config")(
            text_config={"model_type": "llama", **text}, vision_config=vision, scale_factor=2,
            image_token_id=ids("<image>"), pad_token_id=None,
        )  # fmt: skip
    elif model_type == "gemma3":
        name = "Gemma3"
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
        config = transformers.Gemma3Config(
            text_config={**text, "head_dim": 8, "query_pre_attn_scalar": 8, **kinds},
            vision_config=vision, mm_tokens_per_image=4,
            image_token_index=ids("<image_soft_token>"), boi_token_index=ids("<start_of_image>"),
            eoi_token_index=ids("<end_of_image>"),
        )  # fmt: skip
    else:
        name = QWEN[model_type]
        vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
        vision |= {"temporal_patch_size": 2}
        if model_type == "qwen2_vl":
            vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
        elif model_type == "qwen2_5_vl":
            vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
            vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        else:
            vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
            vision |= {"num_position_embeddings": 64}
            vision |= {"deepstack_visual_indexes": [0]} if "vl" in model_type else {}
            text |= {"head_dim": 8}
            text |= EXPERTS if "moe" in model_type else {}
            text |= HYBRID if "qwen3_5" in model_type else {}
        config = getattr(transformers, name + "Config")(
            text_config={**text, "rope_parameters": M_ROPE},
            vision_config=vision,
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
    kind = getattr(transformers, name + "ForConditionalGeneration")
    made = kind._from_config(config, **common).train()
    if model_type == "gemma3":  # zeros would hide the tower from the loss
        torch.nn.init.normal_(made.model.multi_modal_projector.mm_input_projection_weight)
    return made


def image(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def chat(*parts, answer: str = "yes") -> dict:
    """A row: strings are text, images are images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def chats() -> list[dict]:
    """One image, none, two of other sizes, a plain text, one again."""
    return [
        chat(image(16, 24), "what?", answer="a cat"),
        chat("no image", answer="none here"),
        chat("first", image(40, 16, 1), "and", image(24, 24, 2), answer="two of them"),
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        chat(image(32, 32, 3), answer="square"),
    ]
