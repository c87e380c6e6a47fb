"""`nopad doctor` finds a leak in seconds, and its exit status says so."""

import json
import logging
import re
import warnings

import pytest
from nopad.attention.hf import PackedDifferences, sequence_limit
from nopad.cli import doctor_heads, doctor_parity
from nopad.cli.doctor import main
from nopad.cli.doctor_isolation import (
    MASKS,
    MAX_NOTE,
    IsolationResult,
    check_isolation,
    report,
    with_attention,
)
from nopad.cli.load_pretrained import load_model
from nopad.cli.terminal import console
from nopad.cli.tiny_model import tiny_config, tiny_model
from nopad.packing import PackedDataset
from nopad.trainer.loss import attach_loss
from nopad.trainer.monitoring import check_run
from odd_models import odd_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BertForMaskedLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def verdicts(text):
    """{attention: verdict} of a printed table."""
    rows = [line.split() for line in text.splitlines()]
    known = ("nopad", "flash_attention_2", "sdpa", "eager", "flex_attention")
    return {row[0]: row[1] for row in rows if row and row[0] in known}


def test_a_model_that_packs_rightly_passes(capsys):
    level, filters = logging.getLogger("nopad").level, list(warnings.filters)
    assert main(["llama", "--attn", "nopad,sdpa,eager"]) == 0
    assert (logging.getLogger("nopad").level, list(warnings.filters)) == (level, filters)
    text = capsys.readouterr().out
    assert verdicts(text) == {"nopad": "isolated", "sdpa": "isolated", "eager": "isolated"}
    assert "sdpa, eager: needs use_cache=False in the batch (our collators set it)" in text
    assert text.endswith(
        "With nopad's Engine: right.\nWith nopad's trainers: right with nopad, sdpa, eager.\n"
    )


@pytest.mark.parametrize(
    "paged, said",
    [(0.5, "wrong, logits differ from those of the packed row by 5.0e-01"), (None, "does not run")],
)
def test_an_engine_that_differs_leaves_the_verdict_on_training_as_it_is(
    capsys, monkeypatch, paged, said
):
    def check_paged(model):
        if paged is None:
            raise RuntimeError("no kernel image")
        return paged

    monkeypatch.setattr("nopad.cli.doctor_isolation.check_paged", check_paged)
    assert main(["llama", "--attn", "nopad"]) == 1
    text = capsys.readouterr().out
    assert verdicts(text) == {"nopad": "isolated"} and f"With nopad's Engine: {said}" in text
    assert "PackedCollator: right with nopad." in text
    assert text.endswith("With nopad's trainers: right with nopad.\n")


def test_only_what_is_repaired_is_said_to_be(capsys):
    results = [
        IsolationResult("sdpa", "LEAK", PackedDifferences(1.5, 2.5, 3.5, 4.5), repair=MASKS),
        IsolationResult("eager", "LEAK", PackedDifferences(1.5, 2.5, 3.5, 4.5)),
    ]
    model = AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING["llama"]()))
    report(console(), "llama", model, results, [])
    text = " ".join(capsys.readouterr().out.split())
    assert "not with sdpa, eager (documents leak); nopad.attention.document_mask" in text
    assert "repairs sdpa. With nopad's trainers: right with sdpa by repairing" in text
    assert text.endswith("refused with eager (documents leak).")


def test_a_leak_is_told_with_its_cure_and_status_one(capsys):
    assert main(["opt", "--attn", "nopad,sdpa"]) == 1
    text = capsys.readouterr().out
    assert verdicts(text) == {"nopad": "isolated", "sdpa": "LEAK"}
    text = " ".join(text.split())
    assert "right with nopad; not with sdpa (documents leak); nopad.attention.doc" in text
    assert text.endswith("trainers: right with nopad; right with sdpa by repairing the masks.")


def test_a_wrong_result_without_a_leak_is_told_too(tmp_path, capsys):
    """Chunked attention counts its chunks from the start of the pack, not of the document."""
    CONFIG_MAPPING["llama4_text"](attention_chunk_size=8).save_pretrained(tmp_path)
    assert main([str(tmp_path), "--attn", "eager"]) == 1
    assert verdicts(capsys.readouterr().out) == {"eager": "WRONG"}


def test_what_is_refused_is_told_with_the_reason(capsys):
    assert main(["deepseek_v32", "--attn", "nopad"]) == 2, "nothing was checked"
    text = capsys.readouterr().out
    assert verdicts(text) == {"nopad": "refused"} and "Nothing was checked" in text
    assert main(["lfm2", "--attn", "nopad"]) == 0
    text = capsys.readouterr().out
    assert verdicts(text) == {"nopad": "refused"}
    assert "trainers: right with nopad by resetting states at document boundaries" in text
    assert "With nopad's Engine: right." in text
    assert main(["recurrent_gemma", "--attn", "nopad"]) == 2
    assert "Engine: refused, recurrent_gemma carries a state" in capsys.readouterr().out


SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("mamba2", "zamba2")]


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe", *SLOW_KINDS])
def test_a_type_is_examined_with_every_kind_of_layer_that_it_can_have(kind, capsys):
    """The default config of lfm2 has attention alone; that of others cannot be built as it is."""
    assert main([kind, "--attn", "nopad,eager"]) == 1
    captured = capsys.readouterr()
    assert verdicts(captured.out) == {"nopad": "refused", "eager": "LEAK"} and not captured.err
    assert "Not examined" not in captured.out


def test_encoders_and_classifiers_are_examined_with_their_heads(tmp_path, capsys):
    assert main(["roberta"]) == 0
    assert "RobertaForMaskedLM on packs" in (out := " ".join(capsys.readouterr().out.split()))
    assert "right (leak 0" in out and "MaskedCollator(tokenizer)" in out
    config = CONFIG_MAPPING["llama"](architectures=["LlamaForSequenceClassification"])
    config.save_pretrained(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert "one row of logits per document" in " ".join(capsys.readouterr().out.split())


def test_a_leak_of_an_encoder_is_told(capsys, monkeypatch):
    stock = doctor_heads.packed_batch

    def as_one_document(documents):
        batch = stock(documents)
        return {**batch, "cu_seq_lens_q": batch["cu_seq_lens_q"][[0, -1]]}

    monkeypatch.setattr(doctor_heads, "packed_batch", as_one_document)
    assert main(["bert"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "WRONG (leak" in out and "leak 0," not in out


def test_a_gradient_that_is_not_a_number_is_wrong():
    kind = BertForMaskedLM
    model = doctor_heads.load_head(kind, kind.config_class(), None)
    assert doctor_heads.check_head(model).is_right
    model.bert.encoder.layer[1].output.dense.weight.register_hook(lambda g: g * float("nan"))
    report = doctor_heads.check_head(model)
    assert report.gradients != report.gradients and not report.is_right


@pytest.mark.parametrize("index, said", [(3, False), (20, True)])
def test_kinds_of_layers_that_the_tiny_model_of_a_config_lacks_are_told(
    tmp_path, capsys, index, said
):
    CONFIG_MAPPING["bamba"](attn_layer_indices=[index]).save_pretrained(tmp_path)
    main([str(tmp_path / "config.json"), "--attn", "eager"])
    assert ("Not examined: BambaAttention" in capsys.readouterr().out) == said


def test_the_tiny_config_of_gpt_neo_keeps_its_kinds_of_attention():
    assert tiny_config(CONFIG_MAPPING["gpt_neo"](), layers=3).num_layers == 3
    local = CONFIG_MAPPING["gpt_neo"](attention_types=[[["local"], 4]], num_layers=4)
    assert tiny_config(local).attention_layers == ["local", "local"]


def test_an_encoder_decoder_is_refused_with_the_sentence_of_the_trainers(tmp_path, capsys):
    config = CONFIG_MAPPING["t5"](vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1)
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError) as refused:
        attach_loss(model)
    for name in ("t5", str(tmp_path)):
        assert main([name]) == 2
        told = capsys.readouterr()
        assert told.out.endswith(f"T5ForConditionalGeneration: refused: {refused.value}\n")
        assert told.out.count("\n") == 1 and not told.err


def test_a_type_that_cannot_be_made_small_is_one_line(capsys):
    assert main(["prophetnet"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("nopad doctor: cannot build prophetnet: it cannot be made small")
    assert captured.err.count("\n") == 1 and not captured.out


def test_what_does_not_run_here_is_told(capsys):
    assert main(["llama", "--attn", "flash_attention_2,eager"]) == 0
    text = capsys.readouterr().out
    assert verdicts(text) == {"flash_attention_2": "not", "eager": "isolated"}
    assert "flash_attention_2: flash-attn is not installed\n" in text


def test_flex_attention_is_not_compiled_where_it_cannot_train(monkeypatch):
    monkeypatch.setattr("nopad.cli.doctor_isolation.check_packed", None)  # would be called
    config = CONFIG_MAPPING["llama"]()
    model, _ = tiny_model(config, every_kind=True, attn_implementation="eager")
    result = check_isolation(model, "flex_attention", config)
    assert (result.verdict, result.note) == ("not run", "no backward on a CPU")


@pytest.mark.parametrize(
    "kind", ["llama", "bloom", "mamba", pytest.param("llama4_text", marks=pytest.mark.slow)]
)
def test_what_is_said_of_our_trainers_is_what_their_check_does(kind):
    config = CONFIG_MAPPING[kind]()
    oracle, _ = tiny_model(config, every_kind=True, attn_implementation="eager")
    for name in ("nopad", "eager"):
        result = check_isolation(oracle, name, config)
        if result.verdict == "refused":
            continue
        model = with_attention(oracle, name)
        attach_loss(model)
        longest = sequence_limit(model.config) if name == "nopad" else None
        data = PackedDataset(
            [[5] * 40] * 4, budget=64, max_length=longest.length if longest else None
        )
        trains = True
        try:
            check_run(model, data)
        except ValueError:
            trains = False
        assert trains == result.is_right_in_trainers, (kind, name)


def test_a_report_fits_the_width_of_a_pipe_and_of_a_terminal(terminal, capsys):
    results = [
        IsolationResult("flash_attention_2", "not run", note="n" * MAX_NOTE),
        IsolationResult("sdpa", "LEAK", PackedDifferences(1.5, 2.5, 3.5, 4.5)),
        IsolationResult("nopad", "refused", note="a long reason " * 9),
    ]
    model = AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING["llama"]()))
    terminal("NO_COLOR", "1")
    for is_terminal, width in ((False, 100), (True, 80)):
        terminal("COLUMNS", "80")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rich.console.Console.is_terminal", is_terminal)
            report(console(), "llama", model, results, [])
        lines = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
        assert 70 < max(map(len, lines)) <= width
        assert any(line.split()[:3] == ["sdpa", "LEAK", "1.5e+00"] for line in lines)


def test_an_attention_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match=r"--attn 'sdap' is not .*nopad.*sdpa"):
        main(["llama", "--attn", "nopad,sdap"])


def test_attention_dropout_that_training_would_refuse_is_told(tmp_path, capsys):
    assert main(["gpt2", "--attn", "nopad,eager"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("right with nopad (needs attn_pdrop=0 instead of 0.1), eager.")


@pytest.mark.parametrize("kind", ["gemma3", "llama4", "mllama"])
def test_configs_inside_a_config_are_shrunk_too(kind, capsys):
    assert main([kind, "--attn", "nopad"]) == 0
    text = capsys.readouterr().out
    assert int(text.split(" parameters")[0].split()[-1].replace(",", "")) < 1_000_000
    assert verdicts(text) == {"nopad": "isolated"}


def test_a_model_that_stays_large_is_not_built(capsys, monkeypatch):
    monkeypatch.setattr("nopad.cli.tiny_model.MAX_PARAMETERS", 1000)
    assert main(["llama"]) == 2
    assert "its tiny model has" in capsys.readouterr().err


def save_truncated(folder):
    """Save a checkpoint with truncated weights."""
    AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING["llama"]())).save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])


def test_broken_weights_are_one_line_and_status_two(tmp_path, capsys):
    save_truncated(tmp_path)
    assert main([str(tmp_path), "--attn", "nopad"]) == 2
    assert capsys.readouterr().err.startswith(f"nopad doctor: cannot build {tmp_path}: ")
    with pytest.raises(ValueError, match="cannot load"):
        load_model(str(tmp_path))


def test_a_config_file_is_enough(tmp_path, capsys):
    CONFIG_MAPPING["qwen3"]().save_pretrained(tmp_path)
    assert main([str(tmp_path / "config.json"), "--attn", "nopad"]) == 0
    assert verdicts(capsys.readouterr().out) == {"nopad": "isolated"}


def test_a_checkpoint_may_lie_at_home(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING["llama"]()))
    model.save_pretrained(tmp_path / "mine")
    assert main(["~/mine", "--attn", "nopad"]) == 0
    assert verdicts(capsys.readouterr().out) == {"nopad": "isolated"}


def test_a_checkpoint_is_examined_with_its_own_weights(tmp_path, capsys):
    AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING["llama"]())).save_pretrained(
        tmp_path
    )
    assert main([str(tmp_path), "--attn", "nopad"]) == 0
    parameters = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    assert parameters == 128
    assert verdicts(capsys.readouterr().out) == {"nopad": "isolated"}


def test_an_adapter_is_examined_with_its_model(tmp_path, capsys):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING["llama"]()))
    model.save_pretrained(tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    peft.get_peft_model(model, peft.LoraConfig(use_dora=True)).save_pretrained(tmp_path / "dora")
    assert main([str(tmp_path / "dora"), "--attn", "nopad,sdpa"]) == 0
    assert verdicts(capsys.readouterr().out) == {"nopad": "isolated", "sdpa": "isolated"}


def test_parity_of_generation_and_training_is_told_by_dtype_and_backend(capsys, monkeypatch):
    monkeypatch.setattr(doctor_parity, "PROMPT_LENGTHS", (1, 17))  # Triton may be interpreted
    monkeypatch.setattr(doctor_parity, "MAX_TOKENS", 2)
    assert main(["llama", "--parity"]) == 0
    text = capsys.readouterr().out
    rows = {tuple(r[:2]): r for r in (line.split() for line in text.splitlines()) if len(r) > 5}
    assert ("float32", "sdpa") in rows and ("bfloat16", "sdpa") in rows
    assert float(rows["float32", "sdpa,"][4]) == 0.0, "batch-invariant: not even rounding differs"
    assert "not run: float32 flash2 (it needs CUDA)" in text
    assert "not run: bfloat16 flash2 (it needs CUDA)" in text
    assert text.splitlines()[-1].startswith("Generation agrees with training, except for rounding")


def test_without_batch_invariant_support_models_are_still_compared(capsys, monkeypatch):
    monkeypatch.setattr(doctor_parity, "PROMPT_LENGTHS", (1, 5))
    monkeypatch.setattr(doctor_parity, "MAX_TOKENS", 2)
    assert main(["gemma2", "--parity"]) == 0
    assert "batch-invariant (batch_invariant does not support this model" in capsys.readouterr().out


def test_a_mismatch_is_status_one(capsys, monkeypatch):
    def mismatch(*args, **named):
        return doctor_parity.LogprobParity(144, 0.5, 2.0, "float32", "cpu")

    monkeypatch.setattr(doctor_parity, "compare_logprobs", mismatch)
    assert main(["llama", "--parity"]) == 1
    text = capsys.readouterr().out
    assert "TOO LARGE" in text
    assert text.splitlines()[-1].startswith("Generation and training DIFFER by more than rounding")


@pytest.mark.parametrize("fails", [("sdpa",), ("sdpa", "flash2", "triton")])
def test_a_backend_that_runs_everywhere_and_did_not_is_status_one(capsys, monkeypatch, fails):
    def sometimes(*args, backend, **named):
        if backend in fails:
            raise RuntimeError("no kernel image")
        return doctor_parity.LogprobParity(144, 0.0, 0.0, "float32", "cpu")

    monkeypatch.setattr(doctor_parity, "compare_logprobs", sometimes)
    assert main(["llama", "--parity"]) == 1
    text = capsys.readouterr().out
    assert "not run: bfloat16 sdpa (no kernel image)" in text
    assert text.splitlines()[-1].startswith("Generation was NOT compared with training")


def test_parity_of_a_refused_model_is_not_tried(capsys):
    assert main(["bloom", "--parity"]) == 2
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["lfm2", "mamba"])
def test_parity_of_a_model_with_a_state_is_that_of_its_training_on_packs(kind, capsys, monkeypatch):
    monkeypatch.setattr(doctor_parity, "PROMPT_LENGTHS", (5, 7))
    monkeypatch.setattr(doctor_parity, "MAX_TOKENS", 2)
    assert main([kind, "--parity"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    compared = [line[:2] for line in lines if line and line[0] in ("float32", "bfloat16")]
    assert ["float32", "sdpa"] in compared and ["bfloat16", "sdpa"] in compared
    assert kind != "mamba" or len(compared) == 2, "without attention, backends do not differ"
    monkeypatch.setattr(doctor_parity, "attach_loss", lambda model: None)
    assert main([kind, "--parity"]) == 1, "without it, states continue through the pack"


@pytest.mark.parametrize("name", ["no/such/model", "missing.json"])
def test_an_unreadable_model_is_one_line_and_status_two(name, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([name]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("nopad doctor: cannot build")


@pytest.mark.parametrize("kind", ["longrope", "chunked"])
def test_rows_beyond_the_lengths_of_a_model_are_examined(kind):
    oracle = odd_model(kind)
    stock, ours = (check_isolation(oracle, name) for name in ("eager", "nopad"))
    assert stock.verdict == "WRONG" and not stock.repair
    assert ours.verdict == "isolated" and "documents of at most 16" in ours.condition


def test_lengths_that_are_too_long_for_the_check_are_named():
    result = check_isolation(odd_model("longrope", limit=4096), "eager")
    assert "not examined beyond 4096 tokens: use --tiny" in result.note


@pytest.mark.slow
def test_parity_keeps_within_the_chunks_of_a_model(capsys, monkeypatch):
    monkeypatch.setattr(doctor_parity, "PROMPT_LENGTHS", (1, 90))
    monkeypatch.setattr(doctor_parity, "MAX_TOKENS", 4)
    assert main(["llama4_text", "--parity"]) == 0
    assert "TOO LARGE" not in capsys.readouterr().out


def test_an_option_without_effect_and_weights_that_are_no_numbers_are_told(tmp_path, capsys):
    with pytest.raises(ValueError, match="--attn has no effect with --parity"):
        main(["llama", "--parity", "--attn", "sdpa"])
    config = tiny_config(CONFIG_MAPPING["llama"]())
    model = AutoModelForCausalLM.from_config(config)
    model.lm_head.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    assert main([str(tmp_path), "--attn", "nopad"]) == 2
    assert "its logits are not numbers" in capsys.readouterr().err


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("kind", ["SmolVLM", "Gemma3"])
def test_images_of_a_checkpoint_are_checked_with_its_processor(
    kind, fault, tmp_path, capsys, monkeypatch
):
    """Gemma 3 is a causal LM as well, whose text is examined first."""
    import tiny_vlm
    from nopad.collators import packed
    from transformers import AutoProcessor

    tiny_vlm.model(kind.lower()).save_pretrained(tmp_path)
    processor = tiny_vlm.processor(kind.lower())
    processor.save_pretrained(tmp_path)
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *a, **k: processor)
    if fault:
        right = packed.media_inputs
        monkeypatch.setattr(
            packed,
            "media_inputs",
            lambda *given: {name: value.roll(1, 1) for name, value in right(*given).items()},
        )
    assert main([str(tmp_path)]) == int(fault)
    verdict = "WRONG (leak" if fault else "right; train it on PackedDataset(tokenizer=processor)"
    told = " ".join(capsys.readouterr().out.split())
    assert f"{kind}ForConditionalGeneration, packs with images: {verdict}" in told


def test_images_of_a_type_without_a_checkpoint_are_not_checked(capsys):
    assert main(["qwen2_5_vl"]) == 2
    assert "not checked: pass the folder of a checkpoint" in " ".join(
        capsys.readouterr().out.split()
    )
