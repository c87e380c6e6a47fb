"""Before the first step: what would train wrongly is refused, what is repaired is right."""

from __future__ import annotations

import json

import pytest
import tiny_run
import torch
from nopad.attention.hf import probe_rows
from nopad.cli.tiny_model import randomize_weights, tiny_config
from nopad.collators import PackedCollator
from nopad.packing import PackedDataset
from nopad.runtime import destroy_group
from nopad.trainer.data import PackedLoader
from nopad.trainer.data.model_limits import ModelLimits
from nopad.trainer.monitoring import check_run
from nopad.trainer.monitoring.packing_difference import measure_difference, measure_leak
from nopad.trainer.monitoring.preflight import check_batches, check_first_batches
from odd_models import odd_model
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def test_the_banner_says_what_runs_and_what_to_expect():
    first, second = check_run(tiny_run.model(), tiny_run.dataset())
    assert first == ("llama, attention nopad, document boundaries from cu_seq_lens, leak check 0.0")
    assert "packs of 32 tokens per epoch, fill 9" in second and "0 dropped" in second


def test_the_banner_tells_a_run_of_so_many_packs_from_an_epoch(tmp_path):
    rows = [[1, 2, 3, 4]] * 40
    _, line = check_run(tiny_run.model(), PackedDataset(rows, budget=8, max_packs=3))
    assert line.startswith("3 packs in total, 20 packs of 8 tokens per epoch, fill 100.0%")
    stream = PackedDataset(rows, budget=8, max_packs=3, pretokenize=False)
    _, line = check_run(tiny_run.model(), stream)
    assert line.startswith("3 packs of 8 tokens; lengths are unknown")
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps({'input_ids': [1, 2, 3, 4]})}\n" * 40)
    _, line = check_run(tiny_run.model(), PackedDataset(path, budget=8, pretokenize=False))
    assert line.endswith("; about 24 per epoch, estimated from the first rows")


@pytest.mark.parametrize(
    "stopping_strategy, packs, laps",
    [
        ("first_exhausted", 20, ["0.26 times", "once"]),
        ("all_exhausted", 80, ["once", "4 times"]),
        ("all_exhausted_without_replacement", 50, ["once", "once"]),
    ],
)
def test_the_banner_of_a_mixture_is_that_of_its_epoch(stopping_strategy, packs, laps):
    """Of 80 and 20 documents of one length, drawn in turn."""
    mixture = [([[1, 2, 3, 4]] * 80, 1), ([[5, 6, 7, 8]] * 20, 1)]
    data = PackedDataset(mixture, budget=8, stopping_strategy=stopping_strategy)
    report = data.report()
    assert report["packs"] == data.count() == pytest.approx(packs, abs=1)
    _, plan, sources = check_run(tiny_run.model(), data)
    assert plan.startswith(f"{data.count()} packs of 8 tokens per epoch, fill {report['fill']:.1%}")
    assert [part.partition("read ")[2] for part in sources.split(";")] == laps
    assert f"source_1 has {report['shares'][1]:.1%} of the tokens" in sources
    cut = PackedDataset(mixture, budget=8, stopping_strategy=stopping_strategy, max_packs=3)
    told = check_run(tiny_run.model(), cut)[2]
    assert told == sources.replace("an epoch", "a full epoch, not its first 3 packs alone")


def test_of_more_documents_than_are_planned_the_banner_says_about(monkeypatch):
    monkeypatch.setattr("nopad.trainer.monitoring.preflight.MAX_PLANNED", 10)
    rows = [[1, 2, 3, 4]] * 40
    _, line = check_run(tiny_run.model(), PackedDataset(rows, budget=8))
    assert line.startswith("about 20 packs of 8 tokens per epoch, fill 100.0%")
    assert "; of the first 10 samples, 0 split," in line
    by_length = [*([[1, 2]] * 20), *([[1, 2, 3, 4, 5, 6, 7, 8]] * 20)]
    _, line = check_run(tiny_run.model(), PackedDataset(by_length, budget=8))
    assert 20 <= int(line.split()[1]) <= 30, "a sample of all"
    with pytest.raises(ValueError, match="100 tokens is beyond the model's 64 positions"):
        check_run(tiny_run.model(), PackedDataset([*rows, [1] * 100], budget=128))


@pytest.mark.parametrize(
    "stopping_strategy, laps",
    [
        ("first_exhausted", ["0.25 times", "once"]),
        ("all_exhausted", ["once", "4 times"]),
        ("all_exhausted_without_replacement", ["once", "once"]),
    ],
)
def test_a_large_mixture_is_not_planned_whole(monkeypatch, stopping_strategy, laps):
    mixture = [([[1, 2, 3, 4]] * 800, 1), ([[5, 6, 7, 8]] * 200, 1)]
    data = PackedDataset(mixture, budget=8, stopping_strategy=stopping_strategy)
    exact, planned = data.count(), []
    monkeypatch.setattr("nopad.trainer.monitoring.preflight.MAX_PLANNED", 100)
    monkeypatch.setattr(PackedDataset, "report", lambda self: planned.append(1))
    _, plan, sources = check_run(tiny_run.model(), data)
    assert not planned and plan.startswith("about ")
    assert int(plan.split()[1]) == pytest.approx(exact, rel=0.02)
    assert "of the first 100 samples, 0 split" in plan and "fill 100.0%" in plan
    assert [part.partition("read ")[2] for part in sources.split(";")] == laps


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_banner_tells_that_bf16_is_slow_on_a_cpu_without_it(has_bf16, monkeypatch):
    from nopad.trainer.monitoring import flops

    monkeypatch.setattr(flops, "cpu_supports_bf16", lambda: has_bf16)
    model, data = tiny_run.model(), tiny_run.dataset()
    assert not [line for line in check_run(model, data) if "bf16" in line]
    with torch.autocast("cpu", torch.bfloat16):
        lines = [line for line in check_run(model, data) if "pass bf16=False" in line]
    assert len(lines) == (not has_bf16)


def test_a_model_that_cannot_be_packed_is_refused():
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    with pytest.raises(ValueError, match="lets packed samples see each other"):
        check_run(MambaForCausalLM(MambaConfig(**sizes)), tiny_run.dataset())


@pytest.mark.parametrize("place", ["model.layers.{}.self_attn.o_proj", "model.norm"])
def test_layers_that_pass_no_gradient_are_refused(place):
    model = tiny_run.model()
    for index in range(len(model.model.layers)):
        module = model.get_submodule(place.format(index))
        module.register_forward_hook(lambda module, args, out: out.detach())
    with pytest.raises(ValueError, match="no gradient passes between the tokens of a sample"):
        check_run(model, tiny_run.dataset())


STOCK = ["sdpa", "eager"]


@pytest.mark.parametrize(("attention", "known"), zip(STOCK, [True, False], strict=True))
def test_chunks_that_are_cut_by_the_place_in_a_row_are_seen(attention, known):
    rows = [[5, 6, 7, 8]] * 20
    model = odd_model("chunked", attention)
    check_run(model, PackedDataset(rows, budget=16, pretokenize=known))  # inside one chunk
    way_out = r'use attn_implementation="nopad" with samples of at most 16 tokens, or train without'
    with pytest.raises(ValueError, match=rf"differently than alone.*{way_out}"):
        check_run(model, PackedDataset(rows, budget=64, pretokenize=known))
    check_run(odd_model("chunked", "nopad"), PackedDataset(rows, budget=64, pretokenize=known))


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_keys_selected_among_those_of_other_samples_are_seen(attention):
    model, short = odd_model("sparse", attention), [[5, 6, 7, 8]] * 20
    check_run(model, PackedDataset(short, budget=64))
    with pytest.raises(ValueError, match=r"differently than alone.*: train without packing"):
        check_run(model, PackedDataset([*short, [5] * 40], budget=64))


@pytest.mark.parametrize(("kind", "attention"), zip(["longrope", "dynamic"], STOCK, strict=True))
def test_the_check_itself_sees_frequencies_that_depend_on_the_company(kind, attention):
    model = odd_model(kind, attention)
    rows = probe_rows(model.config, budget=64, longest=64)[16]
    assert rows == [[13, 9, 5], [6, 32, 9]]
    across, beyond = (measure_difference(model, None, row) for row in rows)
    assert across == 0.0 and beyond > 0.1


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in ("gemma3_text", "gpt_oss", "mistral", "gpt2")),
        *((kind, torch.bfloat16) for kind in ("gemma3_text", "mixtral")),
    ],
)
def test_what_is_right_passes_in_any_precision(kind, dtype):
    config = tiny_config(CONFIG_MAPPING[kind]())
    for name in ("sliding_window", "sliding_window_size"):
        if getattr(config, name, None):
            setattr(config, name, 24)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="nopad").to(dtype)
    randomize_weights(model)
    check_run(model, PackedDataset([[5, 6, 7, 8]] * 20 + [[9] * 60], budget=64))


def test_a_sequence_beyond_the_positions_is_refused():
    data = PackedDataset([[1] * 100], budget=128)
    told = r"100 tokens is beyond the model's 64 positions: .*\(max_length=64\); .* overflow= "
    with pytest.raises(ValueError, match=told):
        check_run(tiny_run.model(), data)
    _, line = check_run(tiny_run.model(), PackedDataset([[1] * 100], budget=128, max_length=64))
    assert "; samples of at most 64 tokens: 1 samples split, 0 truncated" in line


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("longrope", "nopad"), ("longrope_moe", "nopad"), ("dynamic", "sdpa")],
)
def test_a_sequence_that_would_change_the_frequencies_of_others_is_refused(kind, attention):
    model, rows = odd_model(kind, attention), [[5] * 4] * 8
    check_run(model, PackedDataset(rows, budget=64))
    known = PackedDataset([*rows, [5] * 20], budget=64)
    with pytest.raises(ValueError, match=r"20 tokens is beyond the 16 .*rotary embedding"):
        check_run(model, known)
    loader = PackedLoader(PackedDataset([*rows, [5] * 20], budget=64, pretokenize=False))
    check_first_batches(loader, model)
    with pytest.raises(ValueError, match=r"of 20 tokens, beyond the 16 .*rotary embedding"):
        list(loader)


def test_sample_weights_without_the_loss_that_reads_them_are_refused():
    with pytest.raises(ValueError, match="needs the exact loss"):
        check_run(tiny_run.model(), tiny_run.dataset(), PackedCollator(mean="sample"))


def in_order(rows) -> PackedDataset:
    return PackedDataset(rows, budget=2, strategy="sequential", shuffle=False)


@pytest.mark.parametrize("silent, is_right", [(3, True), (15, True), (16, False)])
def test_data_is_refused_if_none_of_the_first_steps_has_a_label(silent, is_right):
    """The first step alone may have none, by chance."""
    rows = [{"input_ids": [5, 6], "labels": [-100, -100]}] * silent + [{"input_ids": [7, 8]}] * 4
    loader, plain = PackedLoader(in_order(rows)), PackedLoader(in_order(rows))
    check_first_batches(loader, tiny_run.model())
    if not is_right:
        with pytest.raises(ValueError, match="no label of the first steps counts"):
            next(iter(loader))
        return
    states = [(batch["input_ids"].tolist(), loader.state()) for batch in loader]
    assert states == [(batch["input_ids"].tolist(), plain.state()) for batch in plain]
    assert len(states) == silent + 4


def test_a_resume_among_the_last_rows_needs_no_label():
    silent = {"input_ids": [5, 6], "labels": [-100, -100]}
    loader = PackedLoader(in_order([{"input_ids": [7, 8]}, silent]))
    next(iter(loader))
    check_first_batches(loader, tiny_run.model())
    assert [batch["input_ids"].tolist() for batch in loader] == [[[5, 6]]]


@pytest.mark.parametrize(
    ("ids", "labels", "culprit"),
    [
        ([7, -5, 60], [-100, -100, 60], "token -5"),
        ([7, 61, 5], [-100, -100, 5], "token 61"),
        ([7, 8, 9], [-100, -7, 9], "label -7"),
        ([7, 8, 9], [-100, 99, 9], "label 99"),
    ],
)
def test_the_id_that_is_outside_the_vocabulary_is_named(ids, labels, culprit):
    batch = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
    with pytest.raises(ValueError, match=f"^{culprit} is outside the model's vocabulary of 61"):
        check_batches([batch], ModelLimits(61))


def test_the_check_leaves_every_module_in_its_mode():
    model = tiny_run.model()
    model.train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    measure_leak(model)
    assert [module.training for module in model.modules()] == before


def test_the_parameters_of_an_fsdp_model_are_sharded_after_the_check(tmp_path, monkeypatch):
    """An optimizer of gathered parameters would never update the shards."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = fully_shard(tiny_run.model(), mesh=init_device_mesh("cpu", (1,)))
        check_run(model, tiny_run.dataset())
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    finally:
        destroy_group()
