"""A small random Llama, and two tokenizers: byte-level with a chat template, SentencePiece-like."""

from __future__ import annotations

import lm_tasks
import torch

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def small_tokenizer():
    """A tokenizer of our own, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=90 + 256,
        special_tokens=["<s>", "</s>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [row["text"] + row["question"] for row in lm_tasks.documents(20)]
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<s>",
        extra_special_tokens=["<end>"],
        chat_template=CHAT,
    )


def metaspace_tokenizer():
    """A tokenizer that marks spaces as SentencePiece does, and drops the first one of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<s>", "</s>"])
    made.train_from_iterator([row["text"] for row in lm_tasks.documents(20)], trainer)
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<s>"
    )


def random_model(tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def save_checkpoint(folder):
    """Save a random model and its tokenizer; return the folder."""
    tokenizer = small_tokenizer()
    random_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
