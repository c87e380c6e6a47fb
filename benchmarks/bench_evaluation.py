"""Evaluation in the middle of training, and lm_eval's requests, beside what Transformers offers.

    python benchmarks/bench_evaluation.py --model path/to/model       # lm_eval's hf model as peer
    python benchmarks/bench_evaluation.py --shape 1b                  # on a GPU: inside training

With `--model` (real weights; CPU or GPU): multiple choice with four continuations of a context, and
few-shot generation, through lm_eval's `hf` model at its best batch size and through ours; answers
are asserted equal. With `--shape`: random weights and GSM8K-like 8-shot prompts; evaluations in a
training loop by `GenerationEval`, by `generate` in a callback and by `generate_batch`, and the time
an evaluation costs beyond its generation. A table for people, then one JSON line.
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
from record import head, shared_folder, timed, write

RESULTS: list[dict] = []


def note(part: str, who: str, seconds: float, **more) -> None:
    """Print a line of the table and keep it for the record."""
    more = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in more.items()}
    RESULTS.append({"part": part, "who": who, "seconds": round(seconds, 3), **more})
    extra = "  ".join(f"{k} {v}" for k, v in more.items())
    print(f"{part:10} {who:34} {seconds:9.3f} s  {extra}", flush=True)


def questions(count: int) -> list[dict]:
    """GSM8K where it is there, else questions of the same form."""
    file = shared_folder() / "data" / "gsm8k" / "test.jsonl"
    if file.exists():
        return [json.loads(line) for line in file.read_text().splitlines()[:count]]
    rng = random.Random(0)
    made = []
    for _ in range(count):
        a, b, c = (rng.randrange(2, 90) for _ in range(3))
        text = f"Ann has {a} apples and buys {b} bags of {c} apples each. How many has she now? "
        made.append({"question": text * rng.randint(1, 4), "answer": f"{a} + {b} * {c}\n#### {a}"})
    return made


def prompt(examples: list[dict], row: dict) -> str:
    before = [f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in examples]
    return "".join(before) + f"Question: {row['question']}\nAnswer:"


def requests(rows: list[dict], shots: int, new: int, fits) -> tuple[list, list]:
    """lm_eval's requests: four continuations of each context that fits, and a completion of it."""
    from lm_eval.api.instance import Instance

    rng = random.Random(1)
    ends = {id(r): f" The answer is {r['answer'].split('####')[-1].strip()}." for r in rows}
    choices, completions = [], []
    settings = {"until": ["Question:", "\n\n"], "max_gen_toks": new, "do_sample": False}
    short = sorted(rows, key=lambda r: len(r["question"]) + len(r["answer"]))[:shots]
    for number, row in enumerate(r for r in rows if r not in short):
        context = prompt(short, row)
        if not fits(context):
            continue
        for end in [ends[id(row)], *rng.sample(list(ends.values()), 3)]:
            choices.append(Instance("loglikelihood", row, (context, end), number))
        completions.append(Instance("generate_until", row, (context, dict(settings)), number))
    return choices, completions


def beside_lm_eval(args: argparse.Namespace) -> None:
    """Ours beside lm_eval's own model, on the same requests: equal answers, and how fast."""
    from lm_eval.models.huggingface import HFLM
    from nopad.inference.harness import EngineLM

    model, tokenizer = load(args)
    lm = EngineLM(model, tokenizer)
    room = lm.max_length - args.new
    choices, completions = requests(
        questions(args.questions + args.shots),
        args.shots,
        args.new,
        lambda text: len(tokenizer.encode(text)) <= room,
    )
    lengths = [len(tokenizer.encode(r.args[0])) for r in completions]
    ends = statistics.mean(len(tokenizer.encode(r.args[1])) for r in choices)
    print(
        f"{len(completions)} questions, {args.shots} shots, context {statistics.mean(lengths):.0f} "
        f"tokens (longest {max(lengths)}), continuations {ends:.0f}, up to {args.new} new"
    )

    def best(call, runs: int):
        pairs = []
        for _ in range(runs):
            lm.engine.release()  # nothing cached from the run before
            pairs.append(timed(call))
        return min(pairs, key=lambda pair: pair[0])

    asked = {"choice": ("loglikelihood", choices), "generate": ("generate_until", completions)}
    asked = {part: asked[part] for part in args.parts}
    ours = {}
    for part, (call, given) in asked.items():
        ours[part] = best(lambda c=call, g=given: getattr(lm, c)(g, disable_tqdm=True), args.runs)
        note(part, "nopad", ours[part][0], requests=len(given))
    theirs: dict[str, dict[int, float]] = {part: {} for part in asked}
    for batch in args.batches:
        hf = HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=batch, softmax_dtype=args.softmax
        )
        for part, (call, given) in asked.items():
            ask = getattr(hf, call)
            seconds, answers = timed(lambda a=ask, g=given: a(g, disable_tqdm=True))
            theirs[part][batch] = seconds
            note(part, f"lm_eval hf, batch {batch}", seconds, **compare(ours[part][1], answers))
    for part, times in theirs.items():
        batch = min(times, key=times.__getitem__)
        note(part, f"speed-up over batch {batch}", times[batch], ratio=times[batch] / ours[part][0])


def compare(ours: list, theirs: list) -> dict:
    """Assert that the answers are the same; say how close."""
    if isinstance(theirs[0], str):
        differing = sum(a != b for a, b in zip(ours, theirs, strict=True))
        assert differing == 0, f"{differing} of {len(ours)} completions differ"
        return {"differing": differing}
    worst = max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True))
    assert worst < 1e-4 and [a[1] for a in ours] == [b[1] for b in theirs], worst
    picks = [max(range(4), key=lambda i: s[i][0]) for s in four(theirs)]
    assert picks == [max(range(4), key=lambda i: s[i][0]) for s in four(ours)]
    return {"largest_difference": worst}


def four(scores: list) -> list:
    return [scores[i : i + 4] for i in range(0, len(scores), 4)]


def load(args: argparse.Namespace):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not args.model.endswith(".gguf"):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        return model.to(args.device).eval(), AutoTokenizer.from_pretrained(args.model)
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import GgufConfig

    folder, file = os.path.split(args.model)
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, quantization_config=whole)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # The conversion loses the splitting of digits, which the model was trained with.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return model.float().to(args.device).eval(), tokenizer


def inside_training(args: argparse.Namespace) -> None:
    """Evaluations between training steps: ours, `generate` in a callback, `generate_batch`."""
    import generation_workloads as shapes
    from nopad.inference import Engine, SamplingParams
    from nopad.trainer.evaluation import Example, GenerationEval

    model = shapes.llama_1b(args.device) if args.shape == "1b" else tiny(args.device)
    model.train()
    prompts, new = eight_shot(args.questions, args.shots, model.config.vocab_size, args.new)
    tokens = sum(new)
    step = Stepper(model)
    busy: list[float] = []

    class Clocked(Engine):
        """An engine that tells how long its steps took: generation itself, and nothing around."""

        def _finish_all(self, *args, **named) -> object:
            seconds, done = timed(lambda: super(Clocked, self)._finish_all(*args, **named))
            busy.append(seconds)
            return done

    engine = Clocked(model)

    def generate(given: list, params: object, deadline: float | None = None) -> list:
        each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in new]
        return engine.generate(given, each, deadline=deadline)

    evaluation = GenerationEval(
        generate, [Example(p) for p in prompts], {"length": lambda text, _: len(text.split())}
    )
    plain = statistics.median(step.run(8)[2:])
    for number in range(args.evaluations):
        seconds, report = timed(lambda n=number: evaluation.run(n, model))
        assert report.error is None and report.metrics["eval/new_tokens"] == tokens
        after = step.run(3)
        lost = seconds - busy[-1] + max(0.0, after[0] - plain)
        rate = tokens / seconds
        note("training", f"nopad, evaluation {number + 1}", seconds,
             tokens_per_second=rate, lost=lost, step=plain, step_after=after[0])  # fmt: skip
    engine.release()
    if args.device == "cuda":
        batched(model, prompts, new)
    static(model, prompts, new, args.static, args.batches[-1])


class Stepper:
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


def eight_shot(count: int, shots: int, vocabulary: int, most: int):
    """Prompts that share their examples; lengths of GSM8K's questions and answers, in words."""
    rows = questions(count + shots)
    rng = random.Random(0)
    size = lambda text: max(4, int(1.4 * len(text.split())))  # noqa: E731
    ids = lambda n: [rng.randrange(10, vocabulary) for _ in range(n)]  # noqa: E731
    shared = ids(sum(size(r["question"]) + size(r["answer"]) for r in rows[count:]))
    prompts = [shared + ids(size(r["question"])) for r in rows[:count]]
    return prompts, [min(most, size(r["answer"])) for r in rows[:count]]


def batched(model, prompts: list, new: list) -> None:
    """Transformers' continuous batching, at its best: steps of 8192 tokens, the manager kept."""
    from generation_peers import continuous, serve

    start = time.perf_counter()
    with continuous(model, max(new)) as manager:
        ready = time.perf_counter() - start
        for name in ("evaluation 1", "evaluation 2, manager kept"):
            seconds, _ = timed(lambda: serve(manager, prompts, new))
            note("training", f"generate_batch, {name}", seconds,
                 tokens_per_second=sum(new) / seconds, start=ready)  # fmt: skip
            if seconds > 25:  # nothing to warm up at this pace
                break


@torch.no_grad()
def static(model, prompts: list, new: list, count: int, batch: int) -> None:
    """`generate` on padded batches; on `count` of the prompts, and scaled to all of them."""
    model.eval()

    def go() -> None:
        for start in range(0, count, batch):
            rows, lengths = prompts[start : start + batch], new[start : start + batch]
            wide = max(map(len, rows))
            ids = torch.tensor([[0] * (wide - len(r)) + r for r in rows]).to(model.device)
            mask = torch.tensor([[0] * (wide - len(r)) + [1] * len(r) for r in rows])
            model.generate(
                ids, attention_mask=mask.to(model.device), max_new_tokens=max(lengths),
                do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip

    seconds, _ = timed(go)
    scaled = seconds * len(prompts) / count
    note("training", f"generate in a callback, batch {batch}", scaled,
         tokens_per_second=sum(new[:count]) / seconds, measured_on=count)  # fmt: skip
    model.train()


def tiny(device: str):
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
    add("--model", help="folder of a real model, or a gguf file: beside lm_eval's hf model")
    add("--shape", choices=["1b", "tiny"], help="random weights: evaluations inside training")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--questions", type=int, default=48)
    add("--shots", type=int, default=1)
    add("--new", type=int, default=64, help="longest completion")
    add("--batches", type=int, nargs="+", default=[1, 8, 16, 32], help="of the peers")
    add("--parts", nargs="+", default=["choice", "generate"], choices=["choice", "generate"])
    add("--softmax", help="dtype of the peer's softmax; float64 for vocabularies of tens of "
        "thousands, over which torch's log_softmax of float32 loses 1e-5 a token")  # fmt: skip
    add("--runs", type=int, default=2, help="of ours; the best counts, as of the peers' sizes")
    add("--evaluations", type=int, default=3)
    add("--static", type=int, default=64, help="prompts for generate in a callback")
    add("--record", type=Path, help="write the JSON there too")
    args = parser.parse_args()
    if not args.model and not args.shape:
        parser.error("give --model or --shape")
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if args.model:
        beside_lm_eval(args)
    if args.shape:
        inside_training(args)
    record = {
        **head("evaluation"),
        "settings": {k: v for k, v in vars(args).items() if k not in ("model", "record")},
        "model": Path(args.model).name if args.model else args.shape,
        "results": RESULTS,
    }
    write(record, args.record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
