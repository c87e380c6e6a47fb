"""Rows with sequences on both sides of a model's limit are refused; others are right."""

import pytest
import torch
from nopad.attention.hf import frozen_rotary, layer_shapes, packed_batch, random_documents
from nopad.attention.hf.sequence_limits import rotary_limit, sequence_limit
from odd_models import LIMIT, odd_model
from transformers import LlamaConfig

ROTARY = ("longrope", "longrope_moe", "dynamic")


def one_by_one(kind, documents):
    """Each document by a model of its own: dynamic frequencies outlive a call."""
    with torch.no_grad():
        return torch.cat(
            [odd_model(kind)(input_ids=ids, use_cache=False).logits for ids in documents], 1
        )


@pytest.mark.parametrize("kind", [*ROTARY, "chunked"])
def test_up_to_the_limit_a_row_is_its_documents_one_by_one(kind):
    model = odd_model(kind, "nopad")
    documents = random_documents(model, (LIMIT, 9, LIMIT - 1))
    with torch.no_grad():
        packed = model(**packed_batch(documents)).logits
    torch.testing.assert_close(packed, one_by_one(kind, documents), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [*ROTARY, "chunked"])
def test_a_longer_sequence_among_others_is_refused(kind):
    model = odd_model(kind, "nopad")
    batch = packed_batch(random_documents(model, (9, LIMIT + 1, 5)))
    reason = "attends in chunks" if kind == "chunked" else "rotary embedding .* depends on the"
    with pytest.raises(ValueError, match=f"sequence of up to 17 tokens.*{reason}.* 16 tokens"):
        model(**batch)
    del batch["cu_seq_lens_q"], batch["cu_seq_lens_k"]  # boundaries from positions, or one row
    with pytest.raises(ValueError, match=r"sequence of up to (17|31) tokens"):
        model(**batch)
    with pytest.raises(ValueError, match="sequence of up to 20 tokens"):  # rows are sequences
        model(input_ids=torch.ones(2, 20, dtype=torch.int64), use_cache=False)


@pytest.mark.parametrize("kind", ROTARY)
def test_a_longer_sequence_alone_is_right(kind):
    model = odd_model(kind, "nopad")
    documents = random_documents(model, (LIMIT + 14,))
    with torch.no_grad():
        packed = model(**packed_batch(documents)).logits
    torch.testing.assert_close(packed, one_by_one(kind, documents), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ROTARY)
def test_a_probe_leaves_the_frequencies_of_the_last_forward(kind):
    model = odd_model(kind)
    rotary = model.model.rotary_emb
    with torch.no_grad():
        model(input_ids=random_documents(model, (LIMIT + 9,))[0], use_cache=False)
    before, attributes = rotary._buffers.copy(), dict(vars(rotary))
    layer_shapes(model)
    with frozen_rotary(model.modules()):
        assert torch.equal(rotary.inv_freq, rotary.original_inv_freq)
    assert all(rotary._buffers[name] is tensor for name, tensor in before.items())
    assert vars(rotary) == attributes


def test_what_has_no_limit_has_none():
    assert sequence_limit(LlamaConfig()) is None
    fixed = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "alpha": 1000.0}
    assert rotary_limit(LlamaConfig(rope_parameters=fixed)) is None


def test_a_limit_may_belong_to_one_type_of_layers():
    config = LlamaConfig()
    config.rope_parameters = {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default"},
    }
    assert sequence_limit(config).length == 32
