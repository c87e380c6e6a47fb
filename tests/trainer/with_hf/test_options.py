"""No option is without effect: every one is honoured, refused, or has nothing to do with packs."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import option_tables as tables
import pytest
import tiny_run
from char_words import char_tokenizer
from hf_child import trainer
from nopad.collators import PackedCollator
from nopad.packing import PackedDataset
from nopad.trainer.with_hf import PackedTrainer, arguments
from transformers import Trainer, TrainingArguments
from trl_run import trl_trainer

TESTS = Path(__file__).parents[2]
REFUSED = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
    "auto_find_batch_size": True, "data_seed": 5, "train_sampling_strategy": "group_by_length",
    "average_tokens_across_devices": False, "label_names": ["start"], "use_cache": True,
    "use_liger_kernel": True, "neftune_noise_alpha": 5.0, "ignore_data_skip": True,
    "dataloader_drop_last": True, "dataloader_in_order": False, "save_on_each_node": True,
    "enable_jit_checkpoint": True,
}  # fmt: skip
"""Values that are refused."""
AGREED = {
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "data_seed": 3,
    "label_names": ["labels"],
}  # fmt: skip
"""Values, not the defaults, that ask for what packs do anyway."""


def names_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind) if field.init}


def check_walk(fields: set[str], *groups) -> None:
    """Every option is in exactly one group; groups may name options of other versions."""
    named = [name for group in groups for name in group]
    assert len(named) == len(set(named))
    assert fields <= set(named), f"say what becomes of {sorted(fields - set(named))}"


def test_every_training_argument_has_its_place():
    check_walk(
        names_of(TrainingArguments),
        tables.TRAINING_STOCK, tables.TRAINING_HONOURED, tables.TRAINING_NONE, arguments.TRAINING,
    )  # fmt: skip
    assert REFUSED.keys() == arguments.TRAINING.keys()


def test_every_argument_of_sft_config_has_its_place():
    sft = (tables.SFT_STOCK, tables.SFT_NONE, arguments.SFT)
    check_walk(set(SFT_VALUES) | set(tables.SFT_STOCK) | set(tables.SFT_NONE), *sft)
    trl = pytest.importorskip("trl", reason="the fields are TRL's")
    check_walk(names_of(trl.SFTConfig) - names_of(TrainingArguments), *sft)


def test_every_option_of_lightning_has_its_place():
    import lightning.pytorch as pl

    named = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    check_walk(named, tables.LIGHTNING_STOCK, tables.LIGHTNING_HONOURED, tables.LIGHTNING_NONE)


def test_the_tests_that_show_an_effect_exist():
    for name, node in {**tables.TRAINING_HONOURED, **tables.LIGHTNING_HONOURED}.items():
        file, _, test = node.partition("::")
        assert f"def {test}(" in (TESTS / file).read_text(), name


def test_stock_arguments_arrive_and_only_known_ones_are_changed(tmp_path):
    values = {n: v for n, v in tables.TRAINING_STOCK.items() if v is not None}
    values = {n: v for n, v in values.items() if n in names_of(TrainingArguments)}
    given = TrainingArguments(str(tmp_path), report_to=[], save_strategy="no", **values)
    run = PackedTrainer(tiny_run.model(), given, None, tiny_run.dataset())
    changed = {n for n in names_of(TrainingArguments) if getattr(run.args, n) != getattr(given, n)}
    assert not changed & tables.TRAINING_STOCK.keys()
    assert changed == {
        "max_steps", "remove_unused_columns", "per_device_train_batch_size",
        "per_device_eval_batch_size", "ignore_data_skip",
    }  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_without_effect_is_refused_with_the_way_out(name, tmp_path):
    if name not in names_of(TrainingArguments):
        pytest.skip(reason=f"this version has no {name}")
    with pytest.raises(ValueError, match=rf"^{name}=.* does not apply to packs: .*; omit it$"):
        trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1, **{name: REFUSED[name]})


def test_defaults_and_what_packs_do_anyway_are_taken(tmp_path):
    defaults = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
    for values in (AGREED, {name: defaults[name] for name in REFUSED if name in defaults}):
        trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1, **values)
    ordered = tiny_run.dataset(shuffle=False)
    trainer(tmp_path, ordered, 1, max_steps=1, train_sampling_strategy="sequential")


@pytest.mark.parametrize(
    "setting",
    [{"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False},
     {"non_blocking": True}],
)  # fmt: skip
def test_settings_of_the_stock_loader_are_refused(setting, tmp_path):
    (name,) = setting
    with pytest.raises(ValueError, match=f"^accelerator_config {name}=.*its own packs"):
        trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1, accelerator_config=setting)


def test_arguments_of_the_loader_reach_it(tmp_path, monkeypatch):
    from nopad.trainer.with_hf import trainer as module

    settings = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 5}
    if "dataloader_multiprocessing_context" in names_of(TrainingArguments):
        settings["dataloader_multiprocessing_context"] = "spawn"
    run, _ = trainer(tmp_path, tiny_run.dataset(), 1, max_steps=1, **settings)
    loader = run.get_train_dataloader()._loader
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (1, 5, False)
    if len(settings) == 3:
        assert loader.multiprocessing_context.get_start_method() == "spawn"
    seen: dict = {}
    monkeypatch.setattr(module, "UnsizedLoader", lambda *_, **kw: seen.update(kw) or Mock())
    monkeypatch.setattr(TrainingArguments, "device", SimpleNamespace(type="cuda"))
    for pin in (True, False):
        run.args.dataloader_pin_memory, run.packed_check = pin, False
        monkeypatch.setattr(module.ThroughputMeter, "of", lambda *_: None)
        run.get_train_dataloader()
        assert seen["pin_memory"] is pin


def test_tokens_seen_are_those_of_the_packs(tmp_path):
    packs = tiny_run.packs(tiny_run.dataset(9), 9)
    tokens, padded = sum(len(pack.tokens) for pack in packs), tiny_run.BUDGET * len(packs)
    cases = [("all", None, tokens), ("non_padding", PackedCollator(pad_to_budget=True), tokens)]
    for counted, collator, seen in [*cases, ("all", PackedCollator(pad_to_budget=True), padded)]:
        settings = {"num_train_epochs": 1, "include_num_input_tokens_seen": counted}
        run, _ = trainer(tmp_path, tiny_run.dataset(9), 3, collator=collator, **settings)
        run.train()  # 4 packs, and 2 empty ones that complete the last step
        assert run.state.num_input_tokens_seen == seen


def test_the_last_log_has_the_totals_and_every_rate_counts_samples(tmp_path):
    data, validation = tiny_run.dataset(19), tiny_run.dataset(9)
    more = {"eval_dataset": validation}
    run, _ = trainer(tmp_path, data, 1, more, num_train_epochs=1, logging_steps=3)
    metrics = run.train().metrics
    report, end = data.report(), run.state.log_history[-1]
    for values in (metrics, end):
        assert values["pack/tokens_seen"] == report["packed_tokens"]
    assert end["pack/samples_seen"] == sum(len(pack.lengths) for pack in tiny_run.packs(data, 99))
    samples = sum(len(pack.lengths) for pack in tiny_run.packs(validation, 99))
    predicted = run.predict(validation).metrics
    for prefix, values in (("eval", run.evaluate()), ("test", predicted)):
        counted = values[f"{prefix}_samples_per_second"] * values[f"{prefix}_runtime"]
        assert counted == pytest.approx(samples, rel=0.01)


SFT_VALUES = {
    "max_length": 512, "truncation_mode": "keep_end", "completion_only_loss": False,
    "assistant_only_loss": True, "dataset_text_field": "body", "dataset_kwargs": {"add": 1},
    "dataset_num_proc": 2, "chat_template_path": "x.jinja", "eos_token": "<eos>",
    "shuffle_dataset": True, "packing_strategy": "wrapped", "pad_to_multiple_of": 8,
    "eval_packing": False, "loss_type": "dft",
}  # fmt: skip


@pytest.mark.parametrize("name", SFT_VALUES)
def test_an_argument_of_sft_config_without_effect_is_refused(name, tmp_path):
    data = tiny_run.dataset(shuffle=name != "shuffle_dataset")
    with pytest.raises(ValueError, match=rf"^{name}=.* does not apply to packs: .*; omit it$"):
        trl_trainer(tmp_path, tiny_run.model(), data, **{name: SFT_VALUES[name]})


def test_sft_config_may_ask_for_what_packs_do_anyway(tmp_path):
    agreed = [
        ({}, {"packing": True, "eval_packing": True, "shuffle_dataset": True}),
        ({"overflow": "truncate"}, {"max_length": tiny_run.BUDGET, "padding_free": True}),
        ({"overflow": "split"}, {"max_length": None, "pad_to_multiple_of": None}),
        ({}, {"max_length": tiny_run.BUDGET}),  # no sample is longer
    ]
    for data, settings in agreed:
        run = trl_trainer(tmp_path, tiny_run.model(), tiny_run.dataset(**data), **settings)
    run.train()


def test_a_length_at_which_packs_would_split_samples_is_refused(tmp_path):
    data = PackedDataset([{"input_ids": [1] * 40}], budget=tiny_run.BUDGET)
    with pytest.raises(ValueError, match=r"^max_length=32 does not apply to packs"):
        trl_trainer(tmp_path, tiny_run.model(), data, max_length=tiny_run.BUDGET)


CHAT = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}
PAIR = {"prompt": "ab", "completion": "cd"}


@pytest.mark.parametrize("kind", ["path", "packs", "stream"])
@pytest.mark.parametrize(
    ("option", "row"), [("assistant_only_loss", CHAT), ("completion_only_loss", PAIR)]
)
def test_trl_may_ask_for_the_labels_that_rows_have_anyway(kind, option, row, tmp_path):
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )

    def run(row, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text(f"{json.dumps(row)}\n" * 9)
        more, data = {"processing_class": tokenizer, "budget": 32}, str(path)
        if kind != "path":
            packs = {"budget": more.pop("budget"), "pretokenize": kind == "packs", "epochs": None}
            data = PackedDataset(data, tokenizer=tokenizer, **packs)
        return trl_trainer(tmp_path / "out", tiny_run.model(), data, more, **settings)

    run(row, **{option: True}).train()
    with pytest.raises(ValueError, match=rf"^{option}=True does not apply to packs: .*; omit it$"):
        run({"text": "abcd"}, **{option: True})


def test_a_formatting_function_is_refused(tmp_path):
    more = {"formatting_func": lambda row: row["text"]}
    with pytest.raises(ValueError, match=r"^formatting_func=.*PackedDataset\(format=\)"):
        trl_trainer(tmp_path, tiny_run.model(), tiny_run.dataset(), more)
    assert "formatting_func" not in inspect.signature(Trainer.__init__).parameters
