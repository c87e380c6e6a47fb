"""GRPO and RLOO with rollouts from the model in training."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import time
from pathlib import Path

import pytest
import torch
import warm_python
from char_words import char_tokenizer
from datasets import Dataset
from nopad.inference import Engine, batch_invariant

trl = pytest.importorskip("trl", reason="the trainers are TRL's")

from nopad.trainer.with_trl import LiveGRPOTrainer, LiveRLOOTrainer, LiveRolloutMixin  # noqa: E402
from nopad.trainer.with_trl import rollouts as rollouts_module  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

SMALL = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 0,
         "bos_token_id": None, "max_position_embeddings": 64}  # fmt: skip
PROMPTS = Dataset.from_list([{"prompt": text} for text in ("abc", "defgh", "g", "hhha")])


def causal_lm(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with torch.no_grad():
        model.lm_head.weight.mul_(5)  # far from uniform, so that lengths and rewards differ
    return model


def letters(completions, **_):
    return [float(text.count("a")) for text in completions]


def build(
    kind, folder, model=None, rewards=letters, data=PROMPTS, more=None, template=None, **settings
):
    config = trl.RLOOConfig if issubclass(kind, trl.RLOOTrainer) else trl.GRPOConfig
    usual = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4,
             "max_completion_length": 6, "learning_rate": 0.1, "optim": "sgd",
             "save_strategy": "no"}  # fmt: skip
    args = config(
        str(folder), use_cpu=True, bf16=False, report_to=[], logging_steps=1, disable_tqdm=True,
        **{**usual, **settings},
    )  # fmt: skip
    engine = {"engine": Engine} if issubclass(kind, LiveRolloutMixin) else {}
    more = engine | (more or {})
    model, tokenizer = model or causal_lm(), char_tokenizer()
    if template is not None:
        tokenizer.chat_template, tokenizer.response_template = template, {}
    return kind(model, rewards, args=args, train_dataset=data, processing_class=tokenizer, **more)


def rollouts(trainer, checkpoint=None) -> list[list[list[int]]]:
    """The completions of each call of the engine, as training goes on."""
    calls, complete = [], trainer._complete

    def recorded(*args, **kwargs):
        completions = complete(*args, **kwargs)
        calls.append([list(c.token_ids) for c in completions])
        return completions

    trainer._complete = recorded
    trainer.train(None if checkpoint is None else str(checkpoint))
    return calls


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("kind", [LiveGRPOTrainer, LiveRLOOTrainer])
def test_live_training_equals_padded_training_on_the_same_rollouts(
    kind, adapter, tmp_path, monkeypatch
):
    causal_lm().save_pretrained(tmp_path / "model")
    peft = pytest.importorskip("peft", reason="adapters are PEFT's")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    more = {"peft_config": lora if adapter else None}
    run = {"more": more, "beta": 0.1, "num_iterations": 2}
    live = build(kind, tmp_path, str(tmp_path / "model"), **run)
    made = rollouts(live)
    stock = trl.GRPOTrainer if kind is LiveGRPOTrainer else trl.RLOOTrainer
    monkeypatch.setattr(stock, "_generate_single_turn", _replay(kind, made))
    padded = build(stock, tmp_path, str(tmp_path / "model"), **run)
    padded.train()
    check_equal(live, padded)


TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def count(text: str) -> str:
    """Count letters.

    Args:
        text: the letters.
    """
    return "abc"[len(text) % 3]


class Room:
    """An environment with a tool and a reward of its own."""

    def reset(self, **_):
        self.calls = 0
        return "h"

    def look(self, text: str) -> str:
        """Look around.

        Args:
            text: where.
        """
        self.calls += 1
        return count(text)

    def get_reward(self) -> float:
        return float(self.calls)


def messages(completions, **_):
    return [len(turns) + ("b" in turns[-1]["content"]) for turns in completions]


@pytest.mark.parametrize(
    ("tool", "more"),
    [("count", {"tools": [count]}), ("look", {"environment_factory": Room})],
)
def test_tools_and_environments_are_those_of_trl(tool, more, tmp_path, monkeypatch):
    """Short turns call a tool, until the completion is as long as it may be."""
    from trl.trainer import grpo_trainer

    def parsed(tokenizer, ids, **_):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        called = {"type": "function", "function": {"name": tool, "arguments": {"text": text}}}
        calls = {"tool_calls": [called]} if len(ids) < 6 else {}
        return {"role": "assistant", "content": text, **calls}

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(grpo_trainer, "parse_response", parsed)
    for name in ("supports_tool_calling", "is_chat_template_prefix_preserving"):
        monkeypatch.setattr(grpo_trainer, name, lambda _: True)
    causal_lm().save_pretrained(tmp_path / "model")
    asked = Dataset.from_list([{"prompt": [{"role": "user", "content": word}]} for word in "cde"])
    run = {"rewards": messages, "data": asked, "more": more, "template": TEMPLATE,
           "max_completion_length": 24, "num_iterations": 2, "beta": 0.1}  # fmt: skip
    live = build(LiveGRPOTrainer, tmp_path, str(tmp_path / "model"), **run)
    made = rollouts(live)
    assert len(made) > 1  # the first turn, and others after tool calls
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", _replay(LiveGRPOTrainer, made))
    padded = build(trl.GRPOTrainer, tmp_path, str(tmp_path / "model"), **run)
    padded.train()
    check_equal(live, padded)
    assert live.state.log_history[0]["tools/call_frequency"] > 0


def check_equal(live, padded) -> None:
    for line, expected in zip(live.state.log_history, padded.state.log_history, strict=True):
        clock = {n: v for n, v in expected.items() if "time" in n or "per_second" in n}
        assert {**line, **clock} == pytest.approx(expected, abs=1e-5, rel=1e-4)
    for weight, expected in zip(live.model.parameters(), padded.model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-5)


def test_twins_differ_and_every_step_has_its_own(tmp_path):
    run = {"data": PROMPTS.select([0, 0]), "learning_rate": 0.0, "max_completion_length": 12}
    first, second = rollouts(build(LiveGRPOTrainer, tmp_path, **run))
    assert len({tuple(ids) for ids in first}) == 4 and first != second
    assert [first, second] == rollouts(build(LiveGRPOTrainer, tmp_path, **run))
    assert [first, second] != rollouts(build(LiveGRPOTrainer, tmp_path, seed=7, **run))


def _replay(kind, made):
    made = iter(made)

    def generate(self, *args, **kwargs):
        ids = next(made)
        return (ids, None) if kind is LiveGRPOTrainer else ids

    return generate


@pytest.mark.parametrize("step", [3, 5])
def test_a_killed_run_continues_with_the_same_rollouts_and_weights(step, tmp_path):
    run = {"max_steps": 8, "save_steps": step, "save_strategy": "steps", "optim": "adamw_torch"}
    whole = build(LiveGRPOTrainer, tmp_path / "whole", **run)  # four prompts: 4 steps an epoch
    made = rollouts(whole)
    again = build(LiveGRPOTrainer, tmp_path / "again", **run)
    continued = rollouts(again, tmp_path / "whole" / f"checkpoint-{step}")
    assert continued == made[step:]
    for weight, expected in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_was_killed_continues_bit_for_bit(seed, tmp_path):
    """SIGKILL three times, at random; a checkpoint may be half written then."""
    steps, draw = 12, random.Random(seed)
    script = Path(__file__).parents[1] / "support" / "killed_grpo_child.py"

    def seen(folder) -> list:
        path = folder / "rollouts.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        causal_lm().save_pretrained(folder / "model")

    def run(folder, kill_after: int | None = None) -> int:
        command = [str(script), str(folder), str(steps)]
        process = warm_python.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if kill_after is not None:
            while len(seen(folder)) < kill_after and process.poll() is None:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.3))
            process.kill()
        return process.wait()

    assert run(folders[0]) == 0
    for _ in range(3):
        assert run(folders[1], len(seen(folders[1])) + draw.randint(1, 3)) != 0
    assert run(folders[1]) == 0
    whole, killed = map(seen, folders)
    assert len(killed) > len(whole) == steps  # steps after the last checkpoint were repeated
    assert all(line in whole for line in killed)
    first, second = (torch.load(folder / "weights.pt") for folder in folders)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_a_checkpoint_inside_a_batch_of_rollouts_is_refused(tmp_path):
    run = {"max_steps": 2, "save_steps": 1, "save_strategy": "steps", "num_iterations": 2}
    build(LiveGRPOTrainer, tmp_path, **run).train()
    with pytest.raises(ValueError, match=r"^checkpoint-1 was saved .* a multiple of 2 steps"):
        build(LiveGRPOTrainer, tmp_path, **run).train(str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("kind", [LiveGRPOTrainer, LiveRLOOTrainer])
def test_in_batch_invariant_mode_the_rollouts_have_the_bits_of_the_training_forward(
    kind, tmp_path, monkeypatch
):
    logps, calls = kind._get_per_token_logps_and_entropies, []

    def recorded(self, *args, **kwargs):
        result = logps(self, *args, **kwargs)
        calls.append((torch.is_grad_enabled(), result[0].detach()))
        return result

    monkeypatch.setattr(kind, "_get_per_token_logps_and_entropies", recorded)
    monkeypatch.setattr(rollouts_module, "_logps_from_logits", counted := _counted())
    with batch_invariant(max_length=64):
        run = {"num_iterations": 2, "temperature": 0.7, "beta": 0.0}  # two updates per rollout
        build(kind, tmp_path, data=PROMPTS.select([1]), gradient_checkpointing=False, **run).train()
    (is_old, old), (has_grad, first), (_, second) = calls
    assert not is_old and has_grad and counted.calls == 2  # none for the old policy
    order = [old.tolist().index(row) for row in first.tolist()]  # TRL shuffles the rollouts
    assert torch.equal(old[order], first) and not torch.equal(first, second)


def broken(completions, **_):
    return [completions[0]["answer"]]


async def broken_later(completions, **_):
    return broken(completions)


class Broken:
    """A reward function with a state."""

    def __call__(self, completions, **_):
        return broken(completions)


def test_wrong_use_is_told_in_one_line(tmp_path):
    def told(error, line, train=False, **settings):
        with pytest.raises(error, match=line) as info:
            trainer = build(LiveGRPOTrainer, tmp_path, **settings)
            trainer.train() if train else None
        assert "\n" not in str(info.value)

    told(ValueError, "^use_vllm=True has no effect: the engine generates", use_vllm=True)
    told(ValueError, "^pad_to_multiple_of=8 has no effect: .* omit it", pad_to_multiple_of=8)
    told(ValueError, "^rollout_func= would replace", more={"rollout_func": print})
    other = {"engine": Engine(causal_lm(), char_tokenizer())}
    told(ValueError, "^engine= generates with another model", more=other)
    told(ValueError, "requires at least 2 generations", num_generations=1)
    for rewards in (broken, functools.partial(broken), Broken(), broken_later):
        name = "Broken" if isinstance(rewards, Broken) else "broken"
        told(RuntimeError, f"^reward function {name}.* raised TypeError: .*", True, rewards=rewards)
    told(ValueError, "^generation_kwargs: n is num_generations", generation_kwargs={"n": 2})
    long = Dataset.from_list([{"prompt": "a" * 80}])
    told(ValueError, "^no rollout of prompt 0: the prompt has 80 tokens", True, data=long)
    sampling = {"generation_kwargs": {"num_beams": 2}}
    told(ValueError, "^sampling parameters: .* 'num_beams'", True, **sampling)


def _counted():
    real = rollouts_module._logps_from_logits

    def count(*args):
        count.calls += 1
        return real(*args)

    count.calls = 0
    return count
