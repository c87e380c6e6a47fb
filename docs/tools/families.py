"""The tables of model families: from the lists of the zoo's tests and the records of the grid.

zoo        which types are right in packs and in the engine, which are refused, and why
grid       tokens per second and memory beside the stock trainer
engine     families with kernels of their own; new tokens per second
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from typing import Any

from records import ROOT, VLLM, _generation, _names, _ours, _table, newest

NAMES = {
    "Apertus": "apertus", "Bamba": "bamba", "BLOOM": "bloom", "Command R": "cohere",
    "Command R7B, Command A": "cohere2", "DBRX": "dbrx", "DeepSeek-V2": "deepseek_v2",
    "DeepSeek-V3, R1": "deepseek_v3", "DeepSeek-V3.2": "deepseek_v32", "ERNIE 4.5": "ernie4_5",
    "EXAONE 4": "exaone4", "Falcon 7B, 40B": "falcon", "Falcon-H1": "falcon_h1",
    "Falcon Mamba": "falcon_mamba", "Gemma": "gemma", "Gemma 2": "gemma2",
    "Gemma 3 (text)": "gemma3_text", "Gemma 3n (text)": "gemma3n_text",
    "Gemma 4 (text)": "gemma4_text", "GLM-4": "glm4", "GLM-4.5": "glm4_moe", "GPT-2": "gpt2",
    "GPT-J": "gptj", "GPT-NeoX, Pythia": "gpt_neox", "gpt-oss": "gpt_oss", "Granite 3": "granite",
    "Granite 3 MoE": "granitemoe", "Granite 4": "granitemoehybrid", "Hunyuan": "hunyuan_v1_dense",
    "Jamba": "jamba", "Kimi Linear": "kimi_linear", "LFM2": "lfm2",
    "Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2, R1-Distill-Llama": "llama",
    "Llama 4 (text)": "llama4_text",
    "Mamba": "mamba", "Mamba 2": "mamba2", "MiniMax M2": "minimax_m2", "Ministral": "ministral",
    "Mistral 7B": "mistral", "Mixtral": "mixtral", "MPT": "mpt", "Nemotron": "nemotron",
    "Nemotron-H": "nemotron_h", "OLMo 2": "olmo2", "OLMo 3": "olmo3", "OLMoE": "olmoe",
    "OPT": "opt", "Phi-2": "phi", "Phi-3, Phi-4": "phi3", "Phi-3.5-MoE": "phimoe",
    "Qwen2, Qwen2.5, QwQ, R1-Distill-Qwen": "qwen2", "Qwen2 MoE": "qwen2_moe", "Qwen3": "qwen3",
    "Qwen3 MoE (30B-A3B, 235B-A22B)": "qwen3_moe", "Qwen3.5 (text)": "qwen3_5_text",
    "Qwen3-Next": "qwen3_next", "RecurrentGemma": "recurrent_gemma", "RWKV": "rwkv",
    "Seed-OSS": "seed_oss", "SmolLM3": "smollm3", "StableLM": "stablelm",
    "StarCoder 2": "starcoder2", "xLSTM": "xlstm", "Zamba 2": "zamba2",
}  # fmt: skip
"""Model families as their users call them, and their `model_type`."""
TRAIN_ONLY = {"zamba2", "recurrent_gemma"}
"""Refused types that nopad's trainers train: they reset the state at every document."""
STATEFUL_PARTS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Types with images, and the type of their text model, which has a state."""
BY_DOCUMENT = "works, layers with a state document by document"
NOTES = {
    "gemma2": "; fast only with a flash-attn that has soft caps for its head size",
    "gpt_oss": "; sinks by the kernels of flash-attn or torch",
}
"""What else decides the speed of training."""
SHAPES = {"llama": "a", "qwen3": "b"}
"""Workloads of `generation-vllm` by the type of their model."""
MODES = {"full": "", "lora": "LoRA ", "checkpointing": "checkpointed "}


def families_table() -> str:
    """What each family of models can do, by the name that people look for."""
    path, record = newest("training-grid")
    verdicts, trained, generated = _verdicts(), _trained(record), _generated()
    rows = []
    for name, kind in sorted(NAMES.items(), key=lambda pair: pair[0].lower()):
        training, generation = verdicts[kind]
        if training == "works" and kind in trained:
            training = "; ".join(trained[kind])
        if generation == "works" and kind in generated:
            generation = generated[kind]
        rows.append([name, f"`{kind}`", training + NOTES.get(kind, ""), generation])
    return _table(["model", "`model_type`", "packed training", "generation"], rows, path)


def types_table() -> str:
    """What each causal-LM type of Transformers can do; refused ones by their reason."""
    verdicts, by_verdict = _verdicts(), defaultdict(list)
    for kind, verdict in verdicts.items():
        by_verdict[verdict].append(kind)
    order = sorted(by_verdict, key=lambda verdict: -len(by_verdict[verdict]))
    rows = [[*pair, str(len(by_verdict[pair])), _names(by_verdict[pair])] for pair in order]
    return _table(["packed training", "generation", "types", "`model_type`"], rows)


@cache
def _verdicts() -> dict[str, tuple[str, str]]:
    """Return what every type does in training and in generation: works, or why not."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    zoo = _constants("tests/attention/hf/test_model_zoo.py")
    stateful = _constants("tests/inference/test_stateful_models.py")
    states = {*stateful["FAST"], *stateful["SLOW"]}
    states |= {kind for kind, text in STATEFUL_PARTS.items() if text in states}
    verdicts = dict.fromkeys(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), ("works", "works"))
    verdicts |= dict.fromkeys(states & verdicts.keys(), (BY_DOCUMENT, "works, without CUDA graphs"))
    verdicts |= dict.fromkeys(zoo["_TOO_BIG"].split(), ("not tested", "not tested"))
    for kind in zoo["_REFUSED"].split():
        reason = _reason(kind)
        offset = "attach_loss" in reason
        training = BY_DOCUMENT if kind in TRAIN_ONLY else "works" if offset else ""
        verdicts[kind] = training or f"refused: {reason}", f"refused: {reason}"
        if not training:
            verdicts[kind] = f"refused: {reason}", "refused"
    verdicts[zoo["_LEAKS"]] = ("refused: its packs leak", "works, without CUDA graphs")
    return verdicts


def _reason(kind: str) -> str:
    """Return why `nopad` refuses a type, without the type's name."""
    from nopad.attention import unsupported_reason
    from nopad.cli.tiny_model import tiny_model
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model, _ = tiny_model(CONFIG_MAPPING[kind](), every_kind=True)
    reason = str(unsupported_reason(model, states=True)).split(" (")[0]
    return re.sub(rf"^({kind}|{model.config.get_text_config().model_type}) ", "", reason)


def _constants(name: str) -> dict[str, Any]:
    """Return the literals that a file assigns at its top level."""
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            try:
                found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def _cells() -> dict[str, tuple[str, str]]:
    """Return the type and the mode of every cell of the grid."""
    tree = ast.parse((ROOT / "benchmarks/training/grid.py").read_text(encoding="utf-8"))
    cells = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CELLS"
    )
    assert isinstance(cells, ast.Dict)
    found = {}
    for key, call in zip(cells.keys, cells.values, strict=True):
        assert isinstance(call, ast.Call)
        values = [ast.literal_eval(arg) for arg in call.args if isinstance(arg, ast.Constant)]
        found[ast.literal_eval(key)] = (values[0], values[1] if len(values) > 1 else "full")
    return found


def _trained(record: dict[str, Any]) -> dict[str, list[str]]:
    """Return speed and memory beside the stock trainer of every cell, by type."""
    cells, found, runs = _cells(), defaultdict(list), dict(record["cells"])
    default = record.get("hf, the default")
    if default and "nopad" not in runs["llama-1b"]:
        runs["llama-1b"] = default  # three runs, apart from the others
    for name, arms in runs.items():
        kind, mode = cells[name]
        label = MODES[mode] + re.sub(r" (lora|checkpointed)$", "", name)
        if "nopad" in arms:
            found[kind].append(f"{label}: {_beside(arms['nopad'], arms.get('stock'))}")
    return found


def _beside(ours: dict[str, Any], stock: dict[str, Any] | None) -> str:
    if "error" in ours:
        return f"failed ({ours['error'].split(':')[0]})"
    rate = f"{ours['tokens_per_second'] / 1000:.1f} k tokens/s"
    if stock is None or "error" in stock:
        return f"{rate}, stock {'not run' if stock is None else 'failed'}"
    speed = ours["tokens_per_second"] / stock["tokens_per_second"]
    memory = ours["beyond_training_state_GB"] / stock["beyond_training_state_GB"]
    return f"**{speed:.2f}x** speed, {memory:.2f}x memory, {rate}"


def _generated() -> dict[str, str]:
    """Return new tokens per second, by type; families with kernels of their own say so."""
    families = _constants("inference/fused/fused_decoder.py")["_FAMILIES"]
    found = {family.lower(): "works, with kernels for its layers" for family in families}
    _, by_run = _generation("generation-vllm")
    for kind, workload in SHAPES.items():
        ours, vllm = (
            run["tokens_per_second"] for run in (_ours(by_run, workload), by_run[workload, VLLM])
        )
        found[kind] += f": **{ours / vllm:.2f}x** vLLM 0.26, {ours / 1000:.1f} k new tokens/s"
    _, engine = newest("engine-layers")
    gemma = engine["shapes"]["Gemma-3-1B"]["compiled layers"]["tokens_per_second"]
    found["gemma3_text"] = f"works, compiled layers: {gemma / 1000:.1f} k new tokens/s (1B)"
    return found
