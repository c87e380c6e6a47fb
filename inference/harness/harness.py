"""`Harness`: run lm-evaluation-harness tasks on a live model.

    tasks ─▶ requests ─▶ EngineLM ─▶ DataParallelEngine ─▶ Engine ─▶ answers ─▶ metrics

`Harness` loads tasks once and evaluates them on every call, also between two training steps: it
sets no seed and writes no cache.
"""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from numbers import Integral, Real
from pathlib import Path
from threading import RLock
from typing import Any

from lm_eval import evaluator
from lm_eval.api import model as lm_eval_model
from lm_eval.api import task as lm_eval_task
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from ...runtime import draw_stream, preserve_rng
from ..engine import Engine
from .engine_lm import EngineLM

_one_evaluation = RLock()
"""lm_eval keeps its requests in its tasks; its prints and environment belong to the process."""

FEWSHOT_SEED = 1234
"""lm_eval's default seed for few-shot examples, which have a separate generator."""


class Harness:
    """lm_eval tasks, evaluated on a live model at each call.

    `Harness(model, tokenizer, ["arc_easy"], limit=200)()` returns `{"arc_easy/acc": 0.41, ...}`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tasks: Sequence[Any],
        *,
        limit: int | float | None = None,
        num_fewshot: int | None = None,
        chat: bool = False,
        system_instruction: str | None = None,
        gen_kwargs: Mapping[str, Any] | None = None,
        include_path: str | None = None,
        task_manager: TaskManager | None = None,
        **settings: Any,
    ):
        """Load the tasks.

        Args:
            model: the model in training, or any causal LM of Transformers.
            tokenizer: the model's tokenizer.
            tasks: names of tasks and groups, or task configurations as dicts.
            limit: documents per task, or a fraction of them; default: all.
            num_fewshot: examples before each question; default: as the task says.
            chat: apply the tokenizer's chat template to prompts.
            system_instruction: text before every prompt, or the system message of a chat.
            gen_kwargs: generation settings that override those of the tasks; most tasks use a
                temperature only with do_sample=True.
            include_path: folder with your own task files.
            task_manager: one that knows the tasks already, as `find_tasks` returns it.
            settings: arguments of `EngineLM` and `Engine`.
        """
        _check_arguments(tasks, limit, num_fewshot, gen_kwargs)
        if chat and getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("chat is on, but the tokenizer has no chat template")
        manager = task_manager or find_tasks(tasks, include_path)
        self.lm = EngineLM(model, tokenizer, **settings)
        self._limit, self._chat, self._system = limit, chat, system_instruction
        self._device = next(self.lm.model.parameters()).device
        with preserve_rng(self._device):
            # lm_eval modifies the dicts it receives.
            specs = [deepcopy(task) if isinstance(task, dict) else task for task in tasks]
            self._tasks = manager.load(specs)
        for name, task in self._tasks["tasks"].items():
            task_fewshot = task.get_config("num_fewshot")
            if task_fewshot is None or (num_fewshot is not None and task_fewshot != 0):
                task.set_config(key="num_fewshot", value=int(num_fewshot or 0))
            _check_fewshot(name, task)
            if task.get_config("output_type") == "generate_until":
                self._set_gen_kwargs(name, task, gen_kwargs or {})

    def _set_gen_kwargs(self, name: str, task: Any, gen_kwargs: Mapping[str, Any]) -> None:
        """Set the generation settings of a task; raise ValueError if the engine refuses them."""
        merged = {**task.get_config("generation_kwargs"), **gen_kwargs}
        try:
            self.lm.generation_request("", merged)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None
        task.set_config("generation_kwargs", merged)

    @property
    def engine(self) -> Engine:
        """The engine, which other evaluations can share."""
        return self.lm.engine

    def __call__(self, deadline: float | None = None) -> dict[str, float]:
        """Evaluate; return every metric of every task and group, without standard errors.

        lm_eval's progress bars are hidden, since evaluations repeat during training.

        Args:
            deadline: seconds after which TimeoutError is raised.
        """
        with _one_evaluation, _hidden_bars():
            results = self._evaluate(deadline, bootstrap_iters=0)["results"]
        return {
            f"{task}/{_metric_name(name)}": float(value)
            for task, values in results.items()
            for name, value in values.items()
            if _is_number(value) and name != "sample_len"
        }

    def results(self, deadline: float | None = None, samples: bool = False) -> dict[str, Any]:
        """Evaluate; return the results as `lm_eval` does, with standard errors.

        Args:
            deadline: seconds after which TimeoutError is raised.
            samples: include every sample.
        """
        return self._evaluate(deadline, samples, bootstrap_iters=1000)

    def _evaluate(
        self, deadline: float | None, samples: bool = False, *, bootstrap_iters: int
    ) -> dict[str, Any]:
        until = float("inf") if deadline is None else time.monotonic() + deadline
        with (
            _one_evaluation,
            draw_stream("harness"),
            preserve_rng(self._device),
            _single_process(),
        ):
            self.lm.set_deadline(until)
            for task in self._tasks["tasks"].values():
                task.set_fewshot_seed(seed=FEWSHOT_SEED)
            results = evaluator.evaluate(
                lm=self.lm,
                task_dict=self._tasks,
                limit=self._limit,  # pyright: ignore[reportArgumentType]
                log_samples=samples,
                system_instruction=self._system,
                apply_chat_template=self._chat,
                fewshot_as_multiturn=self._chat,
                bootstrap_iters=bootstrap_iters,
            )
        assert results is not None
        return dict(results)


def find_tasks(tasks: Sequence[Any], include_path: str | None = None) -> TaskManager:
    """Return a task manager that knows these tasks; raise ValueError for an unknown one.

    lm_eval's own tasks are indexed only if one of them is needed: that takes seconds.

    Args:
        tasks: names of tasks and groups; other entries are not looked up.
        include_path: folder with your own task files.
    """
    names = [task for task in tasks if isinstance(task, str)]
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path: no folder {include_path}")
    if include_path is not None:
        local = TaskManager(include_path=include_path, include_defaults=False)
        if all(name in local.task_index for name in names):
            return local
    manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.task_index and not Path(name).is_file():
            near = difflib.get_close_matches(name, list(manager.task_index), 3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm_eval ls tasks` lists all"
            raise ValueError(f"no task {name!r}: {hint}")
    return manager


def _check_fewshot(name: str, task: Any) -> None:
    """Raise if a task has fewer examples than its prompts show."""
    wanted = task.get_config("num_fewshot") or 0
    pool: Any = getattr(getattr(task, "sampler", None), "df", None)
    if not wanted or not isinstance(pool, Sized):
        return
    # An example of the evaluated split is not shown in its own prompt.
    shares_split = task.get_config("fewshot_split") == task.get_config("test_split")
    if wanted > len(pool) - shares_split:
        raise ValueError(
            f"{name} has {len(pool) - shares_split} few-shot examples, num_fewshot is {wanted}: "
            "lower it"
        )


def _check_arguments(tasks: Any, limit: Any, num_fewshot: Any, gen_kwargs: Any) -> None:
    if isinstance(tasks, str) or len(tasks) == 0:
        raise ValueError(f"tasks is {tasks!r}; pass a list with at least one name: ['arc_easy']")
    is_limit = _is_number(limit) and (0 < limit < 1 or (limit >= 1 and limit % 1 == 0))
    if limit is not None and not is_limit:
        raise ValueError(
            f"limit is {limit!r}; pass a number of documents >= 1, or a fraction below 1"
        )
    is_count = isinstance(num_fewshot, Integral) and int(num_fewshot) >= 0
    if num_fewshot is not None and not is_count:
        raise ValueError(f"num_fewshot is {num_fewshot!r}; pass a number of examples >= 0")
    if gen_kwargs is not None and not isinstance(gen_kwargs, Mapping):
        raise ValueError(f"gen_kwargs is {gen_kwargs!r}; pass a dict: {{'max_gen_toks': 64}}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@contextmanager
def _single_process() -> Iterator[None]:
    """Keep lm_eval's bootstrap in this process, and send its prints to stderr.

    It would fork a process per core, each with the trainer's threads, device and signal handlers:
    a child that handles SIGTERM as a request to stop after the step never ends. lm_eval has no
    other switch than an environment variable.
    """
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.environ.pop("DISABLE_MULTIPROC", None)
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before


@contextmanager
def _hidden_bars() -> Iterator[None]:
    """Hide lm_eval's progress bars, one for each task and kind of request; it has no switch."""
    before = lm_eval_task.tqdm, lm_eval_model.tqdm
    lm_eval_task.tqdm = lm_eval_model.tqdm = _hidden_bar  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        lm_eval_task.tqdm, lm_eval_model.tqdm = before


def _hidden_bar(*args: Any, **settings: Any) -> tqdm:
    return tqdm(*args, **{**settings, "disable": True})


def _metric_name(name: str) -> str:
    """Return lm_eval's metric,filter as a name; the filter `none` is omitted.

    >>> _metric_name("acc,none"), _metric_name("exact_match,strict-match")
    ('acc', 'exact_match_strict-match')
    """
    return name.removesuffix(",none").replace(",", "_")
