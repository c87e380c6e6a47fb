"""Integration with Transformers: `attn_implementation="nopad"`, supported models, self-checks."""

from .call_check import check_lengths
from .call_log import attention_layers, check_every_layer, is_recording, record_call
from .document_states import (
    convolve_by_document,
    decoder_layers,
    pass_boundaries,
    run_by_document,
    stateful_modules,
)
from .forward_context import current_varlen, forward_context
from .image_attention import ImageAttention
from .interface import register
from .leak_check import (
    embeddings_replaced,
    has_gradient_inside,
    leaked_gradient,
    probe_positions,
    probed_logits,
    zero_weights_filled,
)
from .mask_patch import (
    ATTN_IMPLEMENTATION,
    document_mask,
    install_mask_patch,
    mask_patch_installed,
    uninstall_mask_patch,
)
from .model_support import (
    check_supported,
    declared_state,
    drops_kwargs,
    is_encoder,
    layer_shapes,
    stateful_parts,
    step_context,
    unsupported_reason,
)
from .model_types import position_offset
from .module_modes import eval_mode, module_mode, nopad_attention
from .probe_rows import landmark_lengths, probe_rows
from .router_logits import (
    collect_router_logits,
    has_router_logits,
    install_router_hooks,
    returning_router_logits,
    wants_other_outputs,
)
from .selfcheck import (
    PackedDifferences,
    check_default_cache,
    check_packed,
    check_paged,
    nan_max,
    packed_batch,
    random_documents,
)
from .sequence_limits import (
    SequenceLimit,
    frozen_rotary,
    rotary_limit,
    sequence_limit,
)
from .state_pool import IN_PLACE, StatefulModule, StatePool, current_rows, in_rows
from .step_attention import STEP, running_layer

__all__ = [
    "ATTN_IMPLEMENTATION",
    "IN_PLACE",
    "STEP",
    "ImageAttention",
    "PackedDifferences",
    "SequenceLimit",
    "StatePool",
    "StatefulModule",
    "attention_layers",
    "check_default_cache",
    "check_every_layer",
    "check_lengths",
    "check_packed",
    "check_paged",
    "check_supported",
    "collect_router_logits",
    "convolve_by_document",
    "current_rows",
    "current_varlen",
    "declared_state",
    "decoder_layers",
    "document_mask",
    "drops_kwargs",
    "embeddings_replaced",
    "eval_mode",
    "forward_context",
    "frozen_rotary",
    "has_gradient_inside",
    "has_router_logits",
    "in_rows",
    "install_mask_patch",
    "install_router_hooks",
    "is_encoder",
    "is_recording",
    "landmark_lengths",
    "layer_shapes",
    "leaked_gradient",
    "mask_patch_installed",
    "module_mode",
    "nan_max",
    "nopad_attention",
    "packed_batch",
    "pass_boundaries",
    "position_offset",
    "probe_positions",
    "probe_rows",
    "probed_logits",
    "random_documents",
    "record_call",
    "register",
    "returning_router_logits",
    "rotary_limit",
    "run_by_document",
    "running_layer",
    "sequence_limit",
    "stateful_modules",
    "stateful_parts",
    "step_context",
    "uninstall_mask_patch",
    "unsupported_reason",
    "wants_other_outputs",
    "zero_weights_filled",
]
