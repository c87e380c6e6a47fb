"""Masks in Transformers: documents isolated under sdpa and eager, padding refused for nopad."""

import copy
from pathlib import Path

import nopad
import pytest
import torch
import warm_python
from nopad.attention import document_mask
from nopad.attention.hf import check_packed, mask_patch, packed_batch, random_documents
from nopad.cli.tiny_model import randomize_weights, tiny_config
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, masking_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FORGETFUL = ("gpt_oss", "opt", "falcon", "bloom", "mpt", "xglm", "afmoe", "biogpt")


def models(kind):
    """The type under eager and, where it can, under sdpa, with the same weights."""
    config = tiny_config(CONFIG_MAPPING[kind]())
    oracle = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    randomize_weights(oracle)
    yield oracle.eval(), oracle
    try:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
    except ValueError:  # the type has no sdpa
        return
    model.load_state_dict(oracle.state_dict())
    yield model.eval(), oracle


@pytest.mark.parametrize("kind", FORGETFUL)
def test_models_that_forget_their_positions_leak_and_are_repaired(kind):
    for model, oracle in models(kind):
        assert check_packed(model, oracle).leak > 1e-2, "no longer leaks: take it off the list"
        repaired = check_packed(model, oracle, repair=True)
        assert repaired.leak < 1e-4 and repaired.within(), repaired


def test_the_collator_names_the_types_that_leak_under_stock_attention():
    text = (Path(nopad.__path__[0]) / "collators" / "README.md").read_text()
    assert all(f"`{kind}`" in text for kind in FORGETFUL)


def test_outside_of_document_mask_nothing_is_changed():
    (model, _), *_ = models("opt")
    ids = torch.arange(3, 12)[None]
    before = model(input_ids=ids, use_cache=False).logits
    with document_mask(torch.tensor([0, 4, 9]), 9):
        inside = model(input_ids=ids, use_cache=False).logits
    assert not torch.equal(before, inside)
    assert torch.equal(before, model(input_ids=ids, use_cache=False).logits)


@pytest.fixture
def not_installed():
    """Transformers as it is before the first forward."""
    mask_patch.uninstall_mask_patch()
    yield
    mask_patch.install_mask_patch()


@pytest.fixture
def moved(not_installed, monkeypatch):
    """A version of Transformers that prepares its masks in a function of another name."""
    monkeypatch.setattr(mask_patch, "_TARGET", "_prepare_masks")
    mask_patch._log_moved.cache_clear()


def nopad_model(layers=1):
    config = tiny_config(CONFIG_MAPPING["llama"](), layers=layers)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="nopad")
    randomize_weights(model)
    return model.eval()


IDS = torch.arange(3, 11)[None]
PADDED = torch.tensor([[0] * 3 + [1] * 5])


def test_importing_patches_nothing():
    program = """
import torch, transformers.masking_utils as masking
before = {name: dict(vars(owner)) for name, owner in
          (("masking", masking), ("F", torch.nn.functional), ("Tensor", torch.Tensor))}
import nopad.attention, nopad.trainer, nopad.inference, nopad.collators
from transformers import AttentionInterface
assert "nopad" in AttentionInterface().valid_keys()
for name, owner in (("masking", masking), ("F", torch.nn.functional), ("Tensor", torch.Tensor)):
    changed = [k for k, v in before[name].items() if vars(owner).get(k) is not v]
    assert not changed, (name, changed)
"""
    done = warm_python.run(["-c", program], loaded=warm_python.LIBRARIES)
    assert done.returncode == 0, done.stderr


def test_the_first_forward_refuses_a_padding_mask_and_installs_nothing(not_installed):
    with pytest.raises(ValueError, match="takes no attention_mask"):
        nopad_model()(input_ids=IDS, attention_mask=PADDED, use_cache=False)
    assert not mask_patch.mask_patch_installed()


def test_the_first_forward_installs_the_wrapper(not_installed, monkeypatch):
    model, prepared = nopad_model(), []
    original = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils,
        "find_packed_sequence_indices",
        lambda positions: prepared.append(1) or original(positions),
    )
    logits = [model(input_ids=IDS, use_cache=False).logits for _ in range(3)]
    assert mask_patch.mask_patch_installed() and len(prepared) == 1
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[1], logits[2])
    with pytest.raises(ValueError, match="takes no attention_mask"):
        model(input_ids=IDS, attention_mask=PADDED, use_cache=False)


def test_the_wrapper_is_removed_and_installed_again(not_installed):
    original = masking_utils._preprocess_mask_arguments
    assert mask_patch.install_mask_patch() and mask_patch.install_mask_patch()
    assert masking_utils._preprocess_mask_arguments is not original
    mask_patch.uninstall_mask_patch()
    assert masking_utils._preprocess_mask_arguments is original
    assert not mask_patch.mask_patch_installed()


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "mistral", "gpt_oss"])
@pytest.mark.parametrize("installed", [False, True])
def test_no_mask_is_ignored_by_models_with_windows(kind, installed, not_installed):
    if installed:
        mask_patch.install_mask_patch()
    config = tiny_config(CONFIG_MAPPING[kind]())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="nopad").eval()
    with pytest.raises(ValueError, match="takes no attention_mask"):
        model(input_ids=IDS, attention_mask=PADDED, use_cache=False)
    model(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=False)


@pytest.mark.parametrize("installed", [False, True])
def test_a_packed_forward_compiles_to_one_graph(installed, not_installed):
    if installed:
        mask_patch.install_mask_patch()
    torch.compiler.reset()
    model = nopad_model(layers=2)
    batch = packed_batch(random_documents(model))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)(**batch).logits
    assert counter.frame_count == 1 and mask_patch.mask_patch_installed() == installed
    torch.testing.assert_close(compiled, model(**batch).logits)
    torch.compiler.reset()


def test_a_moved_function_is_logged_once_and_masks_are_refused(moved, caplog):
    model = nopad_model()
    for _ in range(3):
        model(input_ids=IDS, use_cache=False)
    with pytest.raises(ValueError, match="takes no attention_mask"):
        model(input_ids=IDS, attention_mask=PADDED, use_cache=False)
    assert caplog.text.count("no longer prepares masks") == 1
    with pytest.raises(RuntimeError, match="prepares its masks elsewhere"):
        document_mask(torch.tensor([0, 4, 8]), 8).__enter__()
