"""The encoders: a tiny random masked LM of every type that Transformers offers.

Packed, it must give what its documents give one by one under eager attention (logits, gradients).
`EXCEPTIONS` names every other type with its reason; the run is compared with it, so the list can
only shrink.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import transformers
from nopad.attention.hf import is_encoder
from nopad.cli.doctor_heads import check_head, load_head
from nopad.cli.tiny_model import MAX_PARAMETERS
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring.packing_difference import measure_difference, measure_leak
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

TYPES = sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
STOPPED, REFUSED, NOT_SMALL = "stopped by the start check", "refused", "not built small"
WRONG = "wrong"
# They have no attention interface, or mix tokens in other ways.
_STOPPED = """
big_bird convbert deberta deberta-v2 fnet megatron-bert mpnet nystromformer rembert squeezebert
tapas yoso
"""
# Encoder-decoders, other names of the head, and a mask that the model makes itself.
_REFUSED = "bart flaubert layoutlm mbart mvp xlm"
# They need more than tokens, or sizes that `tiny_config` does not know.
_NOT_SMALL = """
esm esmc funnel ibert longformer luke mobilebert modernvbert neomme perceiver reformer roformer
ultravbert
"""
EXCEPTIONS = dict.fromkeys(_STOPPED.split(), STOPPED) | dict.fromkeys(_REFUSED.split(), REFUSED)
EXCEPTIONS |= dict.fromkeys(_NOT_SMALL.split(), NOT_SMALL)
# Its positions begin at 2, and its attention is zero without a CUDA kernel of its own.
EXCEPTIONS["mra"] = WRONG
FAST = {"bert", "roberta", "modernbert", "deberta", "bart"}


def examine(kind: str) -> tuple[str, str]:
    """'right', 'wrong' or a value of EXCEPTIONS, with the details."""
    head = getattr(transformers, MODEL_FOR_MASKED_LM_MAPPING_NAMES[kind])
    try:
        model = load_head(head, CONFIG_MAPPING[kind](), None)
    except Exception as error:
        return NOT_SMALL, f"{type(error).__name__}: {error}"
    if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
        return NOT_SMALL, "too many parameters"
    if not is_encoder(model.config.get_text_config()):
        return WRONG, "its tiny model is a decoder"
    try:
        report = check_head(model)
    except ValueError as error:
        return REFUSED, str(error)
    except Exception as error:
        return NOT_SMALL, f"{type(error).__name__}: {error}"
    return ("right" if report.is_right else STOPPED if is_stopped(model) else WRONG), str(report)


def is_stopped(model) -> bool:
    packed = deepcopy(model).train()
    packed.set_attn_implementation("nopad")
    attach_loss(packed)
    return measure_leak(packed) > 0 or measure_difference(packed, None, [9, 14, 5]) > 0


def marks(kind: str) -> list:
    return [] if kind in FAST else [pytest.mark.slow]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks(kind)) for kind in TYPES])
def test_packed_is_one_by_one_except_where_listed(kind):
    outcome, details = examine(kind)
    assert outcome == EXCEPTIONS.get(kind, "right"), f"{kind}: {outcome}: {details}"


def test_many_types_are_held_to_it():
    newer = {"ultravbert"}  # than the oldest Transformers we support
    assert {*EXCEPTIONS, *FAST} - newer <= {*TYPES}
    assert len(TYPES) - len(EXCEPTIONS) >= 19
