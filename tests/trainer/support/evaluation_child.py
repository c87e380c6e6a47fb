"""One rank of the evaluation tests; prints what it saw as one line of JSON."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import tiny_run
import torch
import torch.distributed as dist
from nopad.inference import DataParallelEngine, Engine, SamplingParams
from nopad.inference.execution.model_runner import ModelRunner
from nopad.runtime import load_draw_counts
from nopad.trainer import fsdp_unshard
from nopad.trainer.evaluation import Example, GenerationEval
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

GREEDY = SamplingParams(temperature=0, max_tokens=5)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=5)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of very different lengths, some of them twice."""
    rng = random.Random(seed)
    made = [[rng.randrange(1, 60) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    return made + made[: count // 3]


def lists(completions: list) -> list:
    return [completion.token_ids for completion in completions]


def failing(engine: Engine, where: int, kind: type[BaseException]):
    """`generate`, raising on one rank in the middle."""

    def generate(*args, **kwargs):
        if rank() == where:
            raise kind("seeded")
        return Engine.generate(engine, *args, **kwargs)

    engine.generate = generate
    return DataParallelEngine(engine).generate


def rank() -> int:
    return dist.get_rank()


def told(work) -> str:
    try:
        return f"nothing: {work()!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def dealt(model, **settings) -> dict:
    """What all ranks together answer, whatever there is to answer."""
    load_draw_counts({})
    ranks = DataParallelEngine(Engine(model, **settings))
    contexts = prompts(5, 1)
    choices = [[[1, 2], [3], [4, 5, 6]][: 1 + i % 3] for i in range(len(contexts))]
    scores = ranks.score(contexts, choices)
    return {
        "greedy": lists(ranks.generate(prompts(9), GREEDY)),
        "sampled": lists(ranks.generate(prompts(9), SAMPLED)),
        "one": lists(ranks.generate([[1, 2, 3]], GREEDY)),
        "none": lists(ranks.generate([], GREEDY)),
        "scores": [[round(s.logprob, 4) for s in row] for row in scores],
    }


def reports(model) -> dict:
    """What evaluations report, good and bad ones."""
    examples = [Example(p, "x") for p in prompts(7, 2)]
    metrics = {"length": lambda text, _: len(text.split())}
    good = GenerationEval(
        DataParallelEngine(Engine(model)).generate, examples, metrics, GREEDY, monitor="length"
    )
    long = [*examples, Example(list(range(1, 60)) * 3, "too long")]
    poison = {**metrics, "bad": lambda text, _: 1 / (len(text.split()) - 5)}

    def run(evaluation):
        report = evaluation.run(1)
        skip = ("seconds", "share")
        kept = {k: v for k, v in report.metrics.items() if not any(s in k for s in skip)}
        return [kept, report.error, report.is_best, [row.completion for row in report.rows]]

    last = dist.get_world_size() - 1
    broken = GenerationEval(failing(Engine(model), last, RuntimeError), examples, metrics, GREEDY)
    return {
        "good": run(good),
        "too long": run(
            GenerationEval(DataParallelEngine(Engine(model)).generate, long, metrics, GREEDY)
        ),
        "metric": run(
            GenerationEval(DataParallelEngine(Engine(model)).generate, examples, poison, GREEDY)
        ),
        "broken": run(broken)[1],
    }


def faults(model) -> dict:
    """What a rank hears when another one fails."""
    last = dist.get_world_size() - 1
    raising = failing(Engine(model), last, ValueError)
    interrupted = failing(Engine(model), last, KeyboardInterrupt)
    exited = failing(Engine(model), last, SystemExit)
    examples = [Example(p) for p in prompts(4)]
    strict = GenerationEval(raising, examples, None, GREEDY, on_error="raise")
    stopped = GenerationEval(interrupted, examples, None, GREEDY)
    return {
        "raises": told(lambda: raising(prompts(4), GREEDY)),
        "strict": told(lambda: strict.run(1)),
        "interrupted": told(lambda: stopped.run(1)),
        "left": told(lambda: GenerationEval(exited, examples, None, GREEDY).run(1)),
    }


def sharded(evaluated: bool, fits: bool = True, breaks: bool = False) -> list:
    """Train under FSDP2, with evaluations before the first step and after others, or without.

    fits: whether the whole parameters may be gathered once.
    breaks: whether the last rank fails in the second step of every evaluation.
    """
    load_draw_counts({})  # each is a run of its own
    fsdp_unshard.free_bytes = lambda device: float("inf") if fits else 0
    model = tiny_run.model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    examples = [Example([3, 4, 5]), Example([7, 8])][: 1 + dist.get_world_size() // 2]
    engine = Engine(model)
    if breaks:
        examples = [Example([3 + i, 4, 5]) for i in range(4)]
        fail_in_second_step(engine)
    evaluation = GenerationEval(DataParallelEngine(engine).generate, examples, None, SAMPLED)
    texts = []
    data = iter(tiny_run.dataset(epochs=None))
    for step in range(6):
        if evaluated and step % 2 == 0:
            report = evaluation.run(step, model)
            texts.append([report.error, [row.completion for row in report.rows]])
        model(**tiny_run.collate(next(data))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kinds = sorted({type(p.data).__name__ for p in model.parameters()})
    single = (
        None if breaks or fits else lists(DataParallelEngine(engine).generate([[1, 2, 3]], GREEDY))
    )
    return [tiny_run.digest(model), kinds, texts, single]


def fail_in_second_step(engine: Engine) -> None:
    generate = engine.generate

    def failing(*args, **kwargs):
        launch, steps = ModelRunner.launch, []

        def second(self, step):
            steps.append(step)
            if len(steps) == 2:
                raise ValueError("seeded")
            return launch(self, step)

        ModelRunner.launch = second if rank() == dist.get_world_size() - 1 else launch
        try:
            return generate(*args, **kwargs)
        finally:
            ModelRunner.launch = launch

    engine.generate = failing


def tensor_parallel() -> list:
    """What pairs of ranks answer that share one model, and whether a deadline is taken."""
    world = dist.get_world_size()
    pairs = (world // 2, 2) if world > 1 else (1, 1)
    model, mesh = tiny_run.model(), init_device_mesh("cpu", pairs, mesh_dim_names=("dp", "tp"))
    across, along = ColwiseParallel(), RowwiseParallel()
    plan: Any = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), across)
    plan |= dict.fromkeys(("o_proj", "down_proj"), along)
    plan = {f"model.layers.*.*.{name}": how for name, how in plan.items()}
    parallelize_module(model, mesh["tp"], plan)
    memory = 40000 if rank() else 90000  # for other numbers of pages
    engine = Engine(model, memory=memory, page_size=16, max_num_seqs=4)
    own = lists(engine.generate(prompts(9), SAMPLED))
    late = told(lambda: engine.generate([[1, 2]], GREEDY, deadline=9))
    return [dealt(model, memory=memory, page_size=16, max_num_seqs=4), own, late]


def uneven(model, runs: int) -> int:
    """Calls with 0 to n prompts, one after the other; how many gave what one rank alone gives."""
    ranks, alone = DataParallelEngine(Engine(model)), Engine(model)
    rng, right = random.Random(5), 0
    seeded = SamplingParams(temperature=1.0, max_tokens=5, seed=11)
    for number in range(runs):
        asked = prompts(rng.randint(0, 5), number)
        right += lists(ranks.generate(asked, seeded)) == lists(alone.generate(asked, seeded))
    return right


def main(runs: int) -> None:
    dist.init_process_group("gloo")
    model = tiny_run.model()
    found = {
        "dealt": dealt(model),
        "reports": reports(model),
        "faults": faults(model),
        "sharded": [sharded(True), sharded(False)],
        "locked": sharded(True, fits=False),
        "locked, broken": sharded(True, fits=False, breaks=True),
        "tensor parallel": tensor_parallel(),
        "uneven": uneven(model, runs),
    }
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
