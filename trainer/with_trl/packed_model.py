"""`PackedModelMixin` for TRL's trainers: batches stay padded, and the models compute packs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch

from ...attention.hf import (
    ATTN_IMPLEMENTATION,
    unsupported_reason,
    zero_weights_filled,
)
from ...runtime import unwrap_model
from ..loss.packed_forward import packed_forward
from ..monitoring.packing_difference import measure_leak
from ..with_hf.intact_checkpoints import IntactCheckpointMixin

STOCK_ATTENTION = ("eager", "sdpa", "flex_attention")
"""Implementations that compute a mask of all pairs of tokens of a pack."""
NO_EFFECT = {
    "pad_to_multiple_of": "batches are packed, without padding",
    "padding_free": "batches are packed already",
}
"""Options that packs would ignore."""


class PackedModelMixin(IntactCheckpointMixin):
    """Mixin, listed before a trainer of TRL, whose model and reference compute packs.

    The trainer is called as TRL's, and its data, losses and metrics are TRL's. Attention of the
    model and of the reference is set to "nopad", unless it is a flash attention. Checkpoints have a
    manifest, and `train(resume_from_checkpoint=True)` resumes from the newest intact one.

    Args:
        budget: tokens of a pack; default: the tokens of a batch of the device. A smaller budget
            saves memory where no gradients are computed.
        args: positional arguments of TRL's trainer.
        kwargs: its keyword arguments. Options that packs would ignore are refused.
    """

    model: Any
    ref_model: Any = None

    def __init__(self, *args: Any, budget: int | None = None, **kwargs: Any):
        given = signature(super().__init__).bind(*args, **kwargs).arguments
        self._check_options(given.get("args"), given)
        if budget is not None and budget < 1:
            raise ValueError(f"budget={budget}: a pack has at least one token")
        self.budget = budget
        self._packed_model: Any = None
        """The model that was prepared for packs."""
        super().__init__(*args, **kwargs)
        if budget is not None and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                f"budget={budget}: ranks of a sharded model run their forwards together, so each "
                "batch must be one pack; omit budget, and lower per_device_train_batch_size"
            )
        self._prepare_models()

    def _check_options(self, config: Any, given: dict[str, Any]) -> None:
        """Refuse arguments without an effect."""
        for name, reason in NO_EFFECT.items():
            if value := vars(config).get(name) if config is not None else None:
                raise ValueError(f"{name}={value} has no effect: {reason}; omit it")

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint and vars(self.args).get("sync_ref_model"):
            raise ValueError(
                "sync_ref_model=True: checkpoints have no reference model, so a resumed run would "
                "begin with another one; set it to False, or do not resume"
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _prepare_models(self) -> None:
        """Let the attention of the models isolate the sequences of a pack, and check it."""
        if self._packed_model is self.model:
            return
        for model in (self.model, self.ref_model):
            if model is not None:
                _set_attention(unwrap_model(model))
        if self.ref_model is not None:
            self._check_tokenizers(unwrap_model(self.model), unwrap_model(self.ref_model))
        _check_isolation(unwrap_model(self.model))
        self._packed_model = self.model

    def _check_tokenizers(self, model: Any, reference: Any) -> None:
        """Compare the reference's tokenizer, if its folder has one, or the vocabularies' sizes."""
        sizes = [m.config.get_text_config().vocab_size for m in (model, reference)]
        tokenizers: tuple[Any, Any] = self.processing_class, _tokenizer_of(reference)
        different = set() if None in tokenizers else _differing_ids(*tokenizers)
        if different:
            other = min(different)
            first, second = (each.convert_ids_to_tokens([other])[0] for each in tokenizers)
            reason = f"has another tokenizer: token {other} is {second!r}, the model's is {first!r}"
        elif tokenizers[1] is None and sizes[0] != sizes[1]:
            reason = f"has a vocabulary of {sizes[1]} tokens, the model one of {sizes[0]}"
        else:
            return
        raise ValueError(f"ref_model {reason}: pass a reference with the same tokenizer")

    @contextmanager
    def _packs(self) -> Iterator[None]:
        self._prepare_models()
        with ExitStack() as stack:
            for model in (self.model, self.ref_model):
                if model is not None:
                    stack.enter_context(packed_forward(model, self.budget))
            yield

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Call that of TRL, with its args and kwargs, on packs."""
        with self._packs():
            return super().compute_loss(*args, **kwargs)

    def compute_ref_log_probs(self, *args: Any, **kwargs: Any) -> Any:
        """Call that of TRL, with its args and kwargs, on packs."""
        # DPO and KTO; their __init__ may compute those of the whole data set.
        with self._packs():
            return super().compute_ref_log_probs(*args, **kwargs)  # pyright: ignore

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with self._packs():  # of GRPO and RLOO
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)  # pyright: ignore


def _tokenizer_of(model: Any) -> Any:
    """Return the tokenizer in the folder or cache that a model was loaded from, if there is one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            model.config._name_or_path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError):
        return None


def _differing_ids(*tokenizers: Any) -> set[int]:
    """Return the ids of ordinary tokens that differ; added tokens may have other names."""
    first, second = (
        {(n, token) for token, n in each.get_vocab().items() if token not in each.get_added_vocab()}
        for each in tokenizers
    )
    return {number for number, _ in first ^ second}


def _set_attention(model: Any) -> None:
    """Use nopad's attention, unless the model already has one that reads boundaries."""
    attention = model.config.get_text_config()._attn_implementation
    if attention not in STOCK_ATTENTION:
        return
    if model.get_output_embeddings() is not None and (reason := unsupported_reason(model)):
        raise ValueError(f"packs need attn_implementation='nopad', but {reason}: use TRL's trainer")
    model.set_attn_implementation(ATTN_IMPLEMENTATION)


def _check_isolation(model: Any) -> None:
    if model.get_output_embeddings() is None:
        return  # a classifier: the check reads the logits of all tokens
    with torch.inference_mode(False), zero_weights_filled(model):
        leak = measure_leak(model)
    if leak:
        attention = model.config.get_text_config()._attn_implementation
        raise ValueError(
            f"{model.config.model_type} with attn_implementation={attention!r} lets packed samples "
            f"see each other (gradients between them: {leak:.2g}): use TRL's trainer"
        )
