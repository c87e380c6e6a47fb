"""`nopad serve MODEL`: an OpenAI-compatible HTTP server on any Hugging Face checkpoint.

    nopad serve path/to/checkpoint --port 8000 --token secret
    curl http://127.0.0.1:8000/v1/completions -H "Authorization: Bearer secret" \\
        -H "Content-Type: application/json" -d '{"prompt": "Once upon a time", "max_tokens": 32}'

Routes: /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics. Every route needs
the token; without --token, one is made and printed. Only this machine can connect unless --host
says otherwise. SIGTERM or Ctrl-C finishes all requests, then exits with status 0 or 130.
"""

from __future__ import annotations

import argparse
import signal
import sys

from .load_pretrained import (
    add_chat_template_option,
    checkpoint_path,
    load_model,
    load_tokenizer,
    set_chat_template,
)
from .options import (
    add_model_argument,
    add_model_options,
    as_cli_message,
    count,
    memory_size,
    number_above_0,
    parser,
    positive,
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    args = _parser().parse_args(argv)
    try:
        return _serve(args)
    except ValueError as error:
        raise ValueError(as_cli_message(error)) from error


def _parser() -> argparse.ArgumentParser:
    command = parser("serve", "MODEL [options]", __doc__)
    add = command.add_argument
    add_model_argument(add, "checkpoint folder or hub name")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=count, default=8000, help="0 takes a free port")
    add("--token", help="what clients must send; default: a new one, printed at the start")
    add("--model-name", help="name in the API; default: that of the checkpoint")
    add_model_options(add)
    add_chat_template_option(add)
    add("--memory", type=memory_size, help="memory of the engine: bytes, or a fraction of free "
        "memory")  # fmt: skip
    add("--max-num-seqs", type=positive, help="maximum number of requests per step")
    add("--max-requests", type=positive, default=64,
        help="maximum open requests; more are refused")  # fmt: skip
    add("--timeout", type=number_above_0, default=60.0, help="seconds a request may take")
    return command


def _serve(args: argparse.Namespace) -> int:
    from ..inference import Engine
    from ..inference.endpoint import Server

    name = checkpoint_path(args.model)
    tokenizer = load_tokenizer(args.tokenizer or name)
    if args.chat_template:
        set_chat_template(tokenizer, args.chat_template)
    memory = {} if args.memory is None else {"memory": args.memory}
    model = load_model(name, args.dtype, args.device)
    server = Server(
        Engine(model, tokenizer, max_num_seqs=args.max_num_seqs, **memory),
        host=args.host,
        port=args.port,
        token=args.token,
        model_name=args.model_name,
        max_requests=args.max_requests,
        timeout=args.timeout,
    )
    print(f"serving {server.model_name} at {server.url}", flush=True)
    if args.token is None:
        print(f"token: {server.token}", flush=True)
    # uvicorn raises the signals that it has caught again, once all requests are finished.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server.run()
    return 0
