"""`NopadPlugin` for Axolotl: packs, attention, loss and evaluation of nopad in an Axolotl run.

    plugins:
      - nopad.integrations.axolotl.NopadPlugin
    sequence_len: 4096
    micro_batch_size: 2                  # packs of 8,192 tokens
    nopad_eval_data: questions.jsonl     # optional: evaluate by generation
    nopad_eval_every: 100

Axolotl reads, formats and tokenizes the data, loads the model and its adapters, and chooses the
optimizer. The plugin replaces Axolotl's packing, attention and loss. Settings of Axolotl that would
have no effect are refused.

Axolotl 0.19 continues without a plugin whose module cannot be imported. So this module imports only
Axolotl's interface, and the rest of nopad in methods, whose errors end the run.
"""

from __future__ import annotations

from typing import Any, Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, PositiveInt

OTHER_TRAINERS = ("rl", "reward_model", "process_reward_model", "kd_trainer", "trainer_cls")
"""Settings that choose another trainer or loss."""
REFUSED = {
    "pretraining_dataset": "it is packed before the plugin sees it: use datasets:",
    "streaming": "it is packed before the plugin sees it: use datasets: without streaming",
    "processor_type": "packs hold text only",
    "context_parallel_size": "it would split documents: lower sequence_len or micro_batch_size",
    "batch_flattening": "packs are flat already",
    "multipack_real_batches": "a batch is one pack of sequence_len * micro_batch_size tokens",
    "sample_packing_bin_size": "packs hold any number of samples",
    "sample_packing_group_size": "nopad packs while it reads",
    "use_eaft": "its loss needs logits, which packs do not compute",
}
"""Settings that packs would ignore, and the reason or the way out."""
ATTENTION_FLAGS = ("xformers", "sage", "flex", "flash", "sdp", "eager")
"""Prefixes of Axolotl's older switches of attention, such as `flash_attention`."""
LORA_KERNELS = ("mlp", "qkv", "o", "embedding")
"""Layers for which Axolotl has LoRA kernels: `lora_mlp_kernel` and so on."""


class NopadArgs(BaseModel):
    """The plugin's settings in Axolotl's YAML."""

    nopad_eval_data: str | None = None
    """File of examples to complete: rows of prompt and completion, or of messages whose last answer
    is the reference. Without it, there is no evaluation by generation."""
    nopad_eval_metric: Literal["exact_match", "contains"] = "exact_match"
    """How a completion is compared with its reference."""
    nopad_eval_every: PositiveInt | None = None
    """Steps between these evaluations; default: at Axolotl's evaluations, and at the end."""
    nopad_eval_max_tokens: PositiveInt = 128
    """Longest completion."""
    nopad_eval_output: str | None = None
    """JSONL file to which every evaluation appends all its completions."""


class NopadPlugin(BasePlugin):
    """Train with packs in Axolotl: `plugins: [nopad.integrations.axolotl.NopadPlugin]`."""

    def get_input_args(self) -> str:
        """Return the name of the class of the plugin's settings."""
        return "nopad.integrations.axolotl.NopadArgs"

    def register(self, cfg: dict) -> None:
        """Refuse settings without effect; turn off what the plugin replaces."""
        from ..attention import register

        check_settings(cfg)
        register()
        for name in ("sample_packing", "eval_sample_packing", "pad_to_sequence_len"):
            cfg[name] = False
        for prefix in ATTENTION_FLAGS:
            cfg.pop(f"{prefix}_attention", None)
        # The model is loaded with an attention that needs no other library, then gets nopad's.
        cfg["attn_implementation"] = "sdpa"
        cfg["include_tkps"] = False  # PackedTrainer logs throughput
        for layer in LORA_KERNELS:  # unset means on in Axolotl; layers are compiled with LoRA
            if cfg.get(f"lora_{layer}_kernel") is None:
                cfg[f"lora_{layer}_kernel"] = False

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Give the model nopad's attention."""
        from ..runtime import unwrap_peft

        unwrap_peft(model).set_attn_implementation("nopad")

    def get_trainer_cls(self, cfg: Any) -> type:
        """Return Axolotl's trainer with packs."""
        from .axolotl_trainer import NopadTrainer

        return NopadTrainer

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Return the arguments that Axolotl derives from padded batches, as packs need them."""
        settings: dict[str, Any] = {
            "max_steps": cfg.max_steps or -1,  # Axolotl's number counts its own batches
            "average_tokens_across_devices": True,
            "dataset_num_proc": None,
            "per_device_eval_batch_size": 1,
        }
        if cfg.warmup_steps is None:
            ratio = 0.03 if cfg.warmup_ratio is None else cfg.warmup_ratio
            settings["warmup_steps"] = ratio  # a fraction of the steps that packs take
        if cfg.curriculum_sampling or cfg.sample_packing_sequentially:
            settings["train_sampling_strategy"] = "sequential"
        return settings

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[Any, dict]:
        """Return the collator of packs."""
        return packed_collator, {}

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list:
        """Return the callback that evaluates by generation, if there are examples."""
        if cfg.nopad_eval_data is None:
            return []
        from ..trainer.with_hf import EvalCallback

        return [EvalCallback(trainer, generation_eval(cfg, trainer))]


def check_settings(cfg: dict) -> None:
    """Refuse settings that would have no effect with packs."""
    if cfg.get("sample_packing") is False:
        raise ValueError("sample_packing: false contradicts the nopad plugin: remove one of them")
    for name in OTHER_TRAINERS:
        if cfg.get(name):
            raise ValueError(f"{name}: the nopad plugin is for supervised fine-tuning: remove it")
    for name, reason in REFUSED.items():
        if cfg.get(name) and not (name == "context_parallel_size" and cfg[name] == 1):
            raise ValueError(f"{name} does not apply to packs: {reason}")
    if cfg.get("nopad_eval_output") and not cfg.get("nopad_eval_data"):
        raise ValueError("nopad_eval_output has no effect without nopad_eval_data: add that file")


def packed_collator(*_: Any, **__: Any) -> Any:
    """Return the collator of packs; Axolotl passes arguments for padding."""
    from ..collators import PackedCollator

    return PackedCollator()


def generation_eval(cfg: Any, trainer: Any) -> Any:
    """Return the evaluation of the live model on `nopad_eval_data`."""
    from ..inference import DataParallelEngine, Engine, SamplingParams
    from ..trainer.evaluation import GenerationEval, contains, exact_match, read_examples

    metric = {"exact_match": exact_match, "contains": contains}[cfg.nopad_eval_metric]
    return GenerationEval(
        DataParallelEngine(Engine(trainer.model, trainer.processing_class)).generate,
        read_examples(cfg.nopad_eval_data),
        {cfg.nopad_eval_metric: metric},
        SamplingParams(temperature=0, max_tokens=cfg.nopad_eval_max_tokens),
        every=cfg.nopad_eval_every,
        output=cfg.nopad_eval_output,
    )
