"""Rollouts from the model in training: GRPO and RLOO generate with an engine, without a copy.

    prompts of a step ─▶ equal ones folded into n ─▶ engine.generate ─▶ completions in TRL's order
                                                         │
                              the weights in training, as they are: nothing is synchronized

Rewards, advantages, losses and metrics are TRL's. Log-probabilities of the policy, the old policy
and the reference are computed as packs.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from ...packing import IGNORE_INDEX
from ...runtime import unwrap_model
from ..fsdp_unshard import unsharded
from .packed_model import PackedModelMixin

REPLACED = {
    "use_vllm": "the engine generates",
    "use_transformers_continuous_batching": "the engine generates",
    "transformers_continuous_batching_config": "the engine generates",
    "cache_implementation": "the engine has its own cache",
}
"""Options of other ways to generate."""


class LiveRolloutMixin(PackedModelMixin):
    """Mixin, listed before `GRPOTrainer` or `RLOOTrainer`, that generates with an engine.

    The random numbers of a rollout depend on the seed of the arguments, the step and the rank, so
    that a resumed run has the rollouts of an uninterrupted one. `generation_kwargs` are sampling
    parameters of the engine.

    Inside `batch_invariant`, log-probabilities of the engine are exactly those of the training
    forward, so they serve as those of the old policy.

    Args:
        engine: an engine of the model in training, or a function of the model and the tokenizer
            that returns one, such as the class `nopad.inference.Engine`.
        budget: tokens of a pack; default: the tokens of a batch of the device.
        args: positional arguments of TRL's trainer.
        kwargs: its keyword arguments. Options without an effect are refused.
    """

    def __init__(self, *args: Any, engine: Any, budget: int | None = None, **kwargs: Any):
        super().__init__(*args, budget=budget, **kwargs)
        model = unwrap_model(self.model)
        self.engine = engine(model, self.processing_class) if callable(engine) else engine
        if self.engine.model is not model:
            raise ValueError(
                "engine= generates with another model than the one in training: pass "
                "engine=Engine, which is then built for it"
            )
        if self.engine.is_batch_invariant and self.args.gradient_checkpointing:
            raise ValueError(
                "gradient_checkpointing=True recomputes layers outside batch_invariant: set it to "
                "False"
            )
        named = zip(self.reward_funcs, self.reward_func_names, strict=True)
        self.reward_funcs = [_named_errors(function, name) for function, name in named]
        self._calls: dict[tuple[str, int], int] = {}
        """Calls of the engine since a step began, by mode and step."""
        self._turns: list[list[list[float]] | None] = []
        """Log-probabilities of each turn of the current rollouts, where the engine returns them."""

    def _check_options(self, config: Any, given: dict[str, Any]) -> None:
        super()._check_options(config, given)
        for name, reason in REPLACED.items():
            if value := vars(config).get(name) if config is not None else None:
                raise ValueError(f"{name}={value} has no effect: {reason}; omit it")
        if "n" in (vars(config).get("generation_kwargs") or {} if config is not None else {}):
            raise ValueError("generation_kwargs: n is num_generations; omit it")
        if given.get("rollout_func") is not None:
            raise ValueError("rollout_func= would replace the engine: omit it, or use GRPOTrainer")

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        # TRL's sampler draws an order for each epoch it has begun, also after a resume.
        sampler: Any = super()._get_train_sampler(*args, **kwargs)
        if sampler is not None:
            sampler.set_epoch = functools.partial(_draw_epochs, sampler)
        return sampler

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        # For all turns: ranks whose completions call tools more often must not wait for others.
        with unsharded(self.model) as fits:
            if not fits:
                raise ValueError(
                    "rollouts need the gathered weights on every device, and they do not fit: "
                    "lower per_device_train_batch_size, or train adapters"
                )
            return super()._generate(*args, **kwargs)  # pyright: ignore

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if images is not None:
            raise ValueError("the engine generates from text only: use TRL's trainer for images")
        is_exact = self._uses_rollout_logprobs()
        completions = self._complete(prompt_ids, with_logprobs=is_exact)
        token_ids = [list(completion.token_ids) for completion in completions]
        logprobs = [[t.logprob for t in c.logprobs] for c in completions] if is_exact else None
        self._turns.append(logprobs)
        return (token_ids, logprobs) if self._is_grpo() else token_ids

    def _complete(self, prompt_ids: list[list[int]], with_logprobs: bool) -> list[Any]:
        """Return a completion for each prompt; equal prompts are one request with several."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, ids in enumerate(prompt_ids):
            groups.setdefault(tuple(ids), []).append(place)
        params = self._sampling_params(with_logprobs)
        each = [{**params, "n": len(places)} for places in groups.values()]
        results: list[Any] = [None] * len(prompt_ids)
        answers = self.engine.generate([list(ids) for ids in groups], each)
        for places, answer in zip(groups.values(), answers, strict=True):
            for place, completion in zip(places, [answer, *answer.others], strict=True):
                if completion.error is not None:
                    raise ValueError(f"no rollout of prompt {place}: {completion.error}")
                results[place] = completion
        return results

    def _sampling_params(self, with_logprobs: bool) -> dict[str, Any]:
        """Return TRL's sampling settings in the engine's names."""
        logprobs = {"logprobs": 0, "logprobs_mode": "processed"} if with_logprobs else {}
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or 0,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "max_tokens": self.max_completion_length,
            "stop_token_ids": self.eos_token_ids,
            "ignore_eos": True,  # the model's own may be others than TRL's
            "seed": self._rollout_seed(),
            **logprobs,
            **(self.args.generation_kwargs or {}),
        }

    def _rollout_seed(self) -> int:
        """Return the seed of one call: a function of the run's seed, the step and the rank."""
        step = "train" if self.model.training else "eval", self.state.global_step
        call = self._calls.get(step, 0)
        others = {key: calls for key, calls in self._calls.items() if key[0] != step[0]}
        self._calls = {**others, step: call + 1}
        rank = self.accelerator.process_index // self.get_tp_size()
        words = repr((self.args.seed, *step, call, rank)).encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "little")

    def _is_grpo(self) -> bool:
        """Whether TRL's trainer takes log-probabilities of rollouts: RLOO does not."""
        stock = super()._generate_single_turn  # pyright: ignore
        return "num_generations" in inspect.signature(stock).parameters

    def _uses_rollout_logprobs(self) -> bool:
        """Whether TRL asks for those of the old policy, and the rollout has the same bits."""
        cycle = self.args.steps_per_generation * self.num_iterations
        is_asked = not self._is_grpo() or self.args.gradient_accumulation_steps % cycle != 0
        return is_asked and self.engine.is_batch_invariant

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        try:
            return super()._generate_and_score_completions(inputs)  # pyright: ignore
        finally:
            self._turns = []

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        batch = model, input_ids, attention_mask, logits_to_keep
        if not self.engine.is_batch_invariant:
            return super()._get_per_token_logps_and_entropies(*batch, *args, **kwargs)
        # After tool calls, the turns continue sequences: their forward is computed.
        rollouts = self._turns[0] if len(self._turns) == 1 else None
        self._turns = []
        mask = attention_mask[:, -logits_to_keep:]
        if rollouts is not None and mask.sum(1).tolist() == [*map(len, rollouts)]:
            old = torch.zeros(mask.shape)
            for row, values in zip(old, rollouts, strict=True):
                row[: len(values)] = torch.tensor(values)
            return old.to(input_ids.device), None, None
        with self._packs():
            return *_logps_from_logits(*batch, self.temperature), None

    def _prepare_inputs(self, inputs: Any) -> Any:
        steps = self.args.steps_per_generation * self.num_iterations
        done = self.state.global_step * self.args.gradient_accumulation_steps
        if self.model.training and self._buffered_inputs is None and done % steps:
            every = -(-steps // self.args.gradient_accumulation_steps)
            raise ValueError(
                f"checkpoint-{self.state.global_step} was saved while its rollouts were in use, "
                f"and they are not saved: resume from a multiple of {every} steps, and set "
                "save_steps to one"
            )
        return super()._prepare_inputs(inputs)


class LiveGRPOTrainer(LiveRolloutMixin, GRPOTrainer):
    """TRL's GRPOTrainer with rollouts from the model in training, and without padding.

    The arguments are those of `LiveRolloutMixin`.
    """


class LiveRLOOTrainer(LiveRolloutMixin, RLOOTrainer):
    """TRL's RLOOTrainer with rollouts from the model in training, and without padding.

    The arguments are those of `LiveRolloutMixin`.
    """


def _draw_epochs(sampler: Any, epoch: int) -> None:
    """Bring the generator of TRL's sampler to the beginning of an epoch."""
    if sampler.shuffle:
        sampler.generator.manual_seed(sampler.seed)
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def _named_errors(function: Any, name: str) -> Any:
    """Name a reward function in its errors; models stay as they are."""
    if isinstance(function, torch.nn.Module):
        return function

    @contextmanager
    def named() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise RuntimeError(
                f"reward function {name} raised {type(error).__name__}: {error}"
            ) from error

    def call(*args: Any, **kwargs: Any) -> Any:
        with named():
            return function(*args, **kwargs)

    async def call_later(*args: Any, **kwargs: Any) -> Any:
        with named():
            return await function(*args, **kwargs)

    is_async = any(map(inspect.iscoroutinefunction, (function, function.__call__)))
    return call_later if is_async else call


def _logps_from_logits(
    model: Any, input_ids: Tensor, attention_mask: Tensor, count: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies [B, count] by the engine's operations.

    For batch-invariant mode, in which TRL's fused LM head has no fixed order of summation.
    """
    outputs = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    logits = outputs.logits[:, -count - 1 : -1].float() / temperature
    total = logits.logsumexp(dim=-1)
    labels = input_ids[:, -count:].masked_fill(attention_mask[:, -count:] == 0, IGNORE_INDEX)
    chosen = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    log_probs = (logits - total[..., None]).detach()
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return (chosen - total) * (labels != IGNORE_INDEX), entropy
