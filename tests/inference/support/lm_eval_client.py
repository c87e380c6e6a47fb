"""Run lm_eval's tasks against a server, in a process of its own: URL TOKEN TOKENIZER TASKS."""

from __future__ import annotations

import json
import os
import sys

import lm_eval
from lm_eval.tasks import TaskManager


def results(model: str, url: str, tokenizer: str, folder: str, task: str, chat: bool) -> dict:
    """Evaluate one task; return its metrics and answers."""
    settings = {"model": "model", "base_url": url, "max_length": 256, "num_concurrent": 8}
    settings |= {} if chat else {"tokenizer": tokenizer, "tokenizer_backend": "huggingface"}
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=settings,
        tasks=[task],
        limit=12,
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    values = {k: v for k, v in found["results"][task].items() if isinstance(v, float)}
    return {"metrics": values, "answers": [sample["resps"] for sample in samples]}


if __name__ == "__main__":
    url, os.environ["OPENAI_API_KEY"], tokenizer, folder = sys.argv[1:]
    completions, chats = f"{url}/completions", f"{url}/chat/completions"
    local, chat = ("local-completions", completions), ("local-chat-completions", chats)
    done = {
        "tiny_choice": results(*local, tokenizer, folder, "tiny_choice", False),
        "tiny_write": results(*local, tokenizer, folder, "tiny_write", False),
        "chat": results(*chat, tokenizer, folder, "tiny_write", True),
    }
    print(json.dumps(done))
