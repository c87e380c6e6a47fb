"""Speed of evaluations during training and of lm_eval requests, beside Transformers.

    python benchmarks/bench_evaluation.py --model path/to/model       # beside lm_eval's hf model
    python benchmarks/bench_evaluation.py --shape 1b                  # on a GPU: during training

With `--model` (real weights; CPU or GPU): multiple choice with four continuations per context, and
few-shot generation, with our lm_eval model and with lm_eval's `hf` model at its best batch size.
The answers must be equal. With `--shape`: random weights and GSM8K-like 8-shot prompts; evaluations
in a training loop with `GenerationEval`, with `generate` in a callback and with `generate_batch`,
and the time that an evaluation costs in addition to generation. Prints a table, and one JSON line
last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

import torch
from record import header, shared_dir, timed, write_record

RESULTS: list[dict] = []


def add_row(part: str, who: str, seconds: float, **more) -> None:
    """Print a row of the table and add it to the record."""
    more = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in more.items()}
    RESULTS.append({"part": part, "who": who, "seconds": round(seconds, 3), **more})
    extra = "  ".join(f"{k} {v}" for k, v in more.items())
    print(f"{part:10} {who:34} {seconds:9.3f} s  {extra}", flush=True)


def questions(count: int) -> list[dict]:
    """Read GSM8K, or make up similar questions where it is absent."""
    file = shared_dir() / "data" / "gsm8k" / "test.jsonl"
    if file.exists():
        return [json.loads(line) for line in file.read_text().splitlines()[:count]]
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        a, b, c = (rng.randrange(2, 90) for _ in range(3))
        text = f"Ann has {a} apples and buys {b} bags of {c} apples each. How many has she now? "
        rows.append({"question": text * rng.randint(1, 4), "answer": f"{a} + {b} * {c}\n#### {a}"})
    return rows


def few_shot_prompt(examples: list[dict], row: dict) -> str:
    shots = [f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in examples]
    return "".join(shots) + f"Question: {row['question']}\nAnswer:"


def lm_eval_requests(rows: list[dict], shots: int, new: int, fits) -> tuple[list, list]:
    """Build lm_eval requests: four continuations and a completion per context that fits."""
    from lm_eval.api.instance import Instance

    rng = random.Random(1)
    answers = {id(r): f" The answer is {r['answer'].split('####')[-1].strip()}." for r in rows}
    choices, completions = [], []
    gen_kwargs = {"until": ["Question:", "\n\n"], "max_gen_toks": new, "do_sample": False}
    examples = sorted(rows, key=lambda r: len(r["question"]) + len(r["answer"]))[:shots]
    for number, row in enumerate(r for r in rows if r not in examples):
        context = few_shot_prompt(examples, row)
        if not fits(context):
            continue
        for answer in [answers[id(row)], *rng.sample(list(answers.values()), 3)]:
            choices.append(Instance("loglikelihood", row, (context, answer), number))
        completions.append(Instance("generate_until", row, (context, dict(gen_kwargs)), number))
    return choices, completions


def compare_lm_eval(args: argparse.Namespace) -> None:
    """Time our model and lm_eval's own on the same requests; assert that the answers are equal."""
    from lm_eval.models.huggingface import HFLM
    from nopad.inference.harness import EngineLM

    model, tokenizer = load_model_and_tokenizer(args)
    lm = EngineLM(model, tokenizer)
    max_prompt = lm.max_length - args.new
    choices, completions = lm_eval_requests(
        questions(args.questions + args.shots),
        args.shots,
        args.new,
        lambda text: len(tokenizer.encode(text)) <= max_prompt,
    )
    lengths = [len(tokenizer.encode(r.args[0])) for r in completions]
    continuation = statistics.mean(len(tokenizer.encode(r.args[1])) for r in choices)
    print(
        f"{len(completions)} questions, {args.shots} shots, context {statistics.mean(lengths):.0f} "
        f"tokens (longest {max(lengths)}), continuation {continuation:.0f}, up to {args.new} new"
    )

    def best(call, runs: int):
        pairs = []
        for _ in range(runs):
            lm.engine.release()  # drop the cache of the previous run
            pairs.append(timed(call))
        return min(pairs, key=lambda pair: pair[0])

    parts = {"choice": ("loglikelihood", choices), "generate": ("generate_until", completions)}
    parts = {part: parts[part] for part in args.parts}
    ours = {}
    for part, (method, requests) in parts.items():
        call = getattr(lm, method)
        ours[part] = best(lambda c=call, r=requests: c(r, disable_tqdm=True), args.runs)
        add_row(part, "nopad", ours[part][0], requests=len(requests))
    theirs: dict[str, dict[int, float]] = {part: {} for part in parts}
    for batch in args.batches:
        hf = HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=batch, softmax_dtype=args.softmax
        )
        for part, (method, requests) in parts.items():
            call = getattr(hf, method)
            seconds, answers = timed(lambda c=call, r=requests: c(r, disable_tqdm=True))
            theirs[part][batch] = seconds
            add_row(part, f"lm_eval hf, batch {batch}", seconds, **compare(ours[part][1], answers))
    for part, times in theirs.items():
        batch = min(times, key=times.__getitem__)
        add_row(
            part, f"speed-up over batch {batch}", times[batch], ratio=times[batch] / ours[part][0]
        )


def compare(ours: list, theirs: list) -> dict:
    """Assert that the answers are the same; return the differences."""
    if isinstance(theirs[0], str):
        differing = sum(a != b for a, b in zip(ours, theirs, strict=True))
        assert differing == 0, f"{differing} of {len(ours)} completions differ"
        return {"differing": differing}
    worst = max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True))
    assert worst < 1e-4 and [a[1] for a in ours] == [b[1] for b in theirs], worst
    picks = [max(range(4), key=lambda i: s[i][0]) for s in by_question(theirs)]
    assert picks == [max(range(4), key=lambda i: s[i][0]) for s in by_question(ours)]
    return {"largest_difference": worst}


def by_question(scores: list) -> list:
    """Group the scores of the four continuations of each question."""
    return [scores[i : i + 4] for i in range(0, len(scores), 4)]


def load_model_and_tokenizer(args: argparse.Namespace):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not args.model.endswith(".gguf"):
        model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
        return model.to(args.device).eval(), tokenizer
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import GgufConfig

    folder, file = os.path.split(args.model)
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, quantization_config=config, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, trust_remote_code=False)
    # The conversion loses the splitting of digits, with which the model was trained.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return model.float().to(args.device).eval(), tokenizer


def compare_during_training(args: argparse.Namespace) -> None:
    """Time evaluations between training steps: ours, `generate_batch`, `generate`."""
    from generation import workloads
    from nopad.inference import Engine, SamplingParams
    from nopad.trainer.evaluation import Example, GenerationEval

    model = workloads.llama_1b(args.device) if args.shape == "1b" else tiny_llama(args.device)
    model.train()
    prompts, new = few_shot_workload(args.questions, args.shots, model.config.vocab_size, args.new)
    tokens = sum(new)
    steps = TrainingSteps(model)
    generation_times: list[float] = []

    engine = Engine(model)
    run = engine._runner.run_steps

    def timed_run(call) -> None:
        """Record the seconds of generation, without what surrounds it."""
        seconds, _ = timed(lambda: run(call))
        generation_times.append(seconds)

    engine._runner.run_steps = timed_run

    def generate(prompts: list, _: object, deadline: float | None = None) -> list:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in new]
        return engine.generate(prompts, params, deadline=deadline)

    evaluation = GenerationEval(
        generate, [Example(p) for p in prompts], {"length": lambda text, _: len(text.split())}
    )
    step_seconds = statistics.median(steps.run(8)[2:])
    for number in range(args.evaluations):
        seconds, report = timed(lambda n=number: evaluation.run(n, model))
        assert report.error is None and report.metrics["eval/new_tokens"] == tokens
        next_step = steps.run(3)[0]
        lost = seconds - generation_times[-1] + max(0.0, next_step - step_seconds)
        rate = tokens / seconds
        add_row(
            "training",
            f"nopad, evaluation {number + 1}",
            seconds,
            tokens_per_second=rate,
            lost=lost,
            step=step_seconds,
            step_after=next_step,
        )
    engine.release()
    if args.device == "cuda":
        run_continuous(model, prompts, new)
    run_static(model, prompts, new, args.static, args.batches[-1])


class TrainingSteps:
    """Training steps on packs of random tokens."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        length = 4096 if next(model.parameters()).is_cuda else 64
        ids = torch.randint(10, model.config.vocab_size, (1, length), generator=generator)
        self.ids = ids.to(next(model.parameters()).device)

    def run(self, count: int) -> list[float]:
        return [timed(self._step)[0] for _ in range(count)]

    def _step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def few_shot_workload(count: int, shots: int, vocab_size: int, max_new: int):
    """Draw random prompts that share their examples, with the lengths of GSM8K."""
    rows = questions(count + shots)
    rng = random.Random(0)
    size = lambda text: max(4, int(1.4 * len(text.split())))  # noqa: E731
    ids = lambda n: [rng.randrange(10, vocab_size) for _ in range(n)]  # noqa: E731
    shared = ids(sum(size(r["question"]) + size(r["answer"]) for r in rows[count:]))
    prompts = [shared + ids(size(r["question"])) for r in rows[:count]]
    return prompts, [min(max_new, size(r["answer"])) for r in rows[:count]]


def run_continuous(model, prompts: list, new: list) -> None:
    """Time continuous batching with its fastest settings; the second call reuses the manager."""
    from generation.peers import continuous_batching, run_requests

    start = time.perf_counter()
    with continuous_batching(model, max(new)) as manager:
        ready = time.perf_counter() - start
        for name in ("evaluation 1", "evaluation 2, manager kept"):
            seconds, _ = timed(lambda: run_requests(manager, prompts, new))
            add_row(
                "training",
                f"generate_batch, {name}",
                seconds,
                tokens_per_second=sum(new) / seconds,
                start=ready,
            )
            if seconds > 25:  # too slow for a second call to matter
                break


@torch.no_grad()
def run_static(model, prompts: list, new: list, count: int, batch: int) -> None:
    """Time `generate` on padded batches of `count` prompts, and scale the time to all prompts."""
    model.eval()

    def generate() -> None:
        for start in range(0, count, batch):
            rows, lengths = prompts[start : start + batch], new[start : start + batch]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(r)) + r for r in rows]).to(model.device)
            mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
            model.generate(
                ids, attention_mask=mask.to(model.device), max_new_tokens=max(lengths),
                do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip

    seconds, _ = timed(generate)
    scaled = seconds * len(prompts) / count
    add_row(
        "training",
        f"generate in a callback, batch {batch}",
        scaled,
        tokens_per_second=sum(new[:count]) / seconds,
        measured_on=count,
    )
    model.train()


def tiny_llama(device: str):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", help="checkpoint directory or gguf file, to compare with lm_eval's hf model")
    add(
        "--shape",
        choices=["1b", "tiny"],
        help="model shape with random weights, to evaluate during training",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--questions", type=int, default=48, help="number of questions")
    add("--shots", type=int, default=1, help="examples per prompt")
    add("--new", type=int, default=64, help="maximum new tokens")
    add("--batches", type=int, nargs="+", default=[1, 8, 16, 32], help="batch sizes of the peers")
    add("--parts", nargs="+", default=["choice", "generate"], choices=["choice", "generate"],
        help="parts of the comparison with lm_eval")  # fmt: skip
    add("--softmax", help="dtype of lm_eval's softmax; use float64 for large vocabularies, where "
        "torch's float32 log_softmax loses 1e-5 per token")  # fmt: skip
    add(
        "--runs",
        type=int,
        default=2,
        help="runs of ours; the best counts, as does the peers' best batch size",
    )
    add("--evaluations", type=int, default=3, help="evaluations during training")
    add("--static", type=int, default=64, help="number of prompts for `generate`")
    add("--record", type=Path, help="also write the JSON record to this file")
    args = parser.parse_args()
    if not args.model and not args.shape:
        parser.error("--model or --shape is required")
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if args.model:
        compare_lm_eval(args)
    if args.shape:
        compare_during_training(args)
    record = {
        **header("evaluation"),
        "settings": {k: v for k, v in vars(args).items() if k not in ("model", "record")},
        "model": Path(args.model).name if args.model else args.shape,
        "results": RESULTS,
    }
    write_record(record, args.record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
