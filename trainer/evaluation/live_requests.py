"""Answer the requests of a live endpoint in the training thread, between two optimizer steps.

    optimizer step ─▶ are requests due? ─▶ run them all ─▶ next step
                             └─ no ─▶ next step

`nopad.inference.endpoint.serve(engine, when=…)` makes the server; the `with_*` packages call
`answer_requests` in a trainer. Rank 0 listens and generates. Only FSDP2 models need the other ranks
for it, and ask rank 0 at every step; with other layouts, they continue to the next collective.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

from torch.distributed.fsdp import FSDPModule

from ...runtime import draw_stream, gather_objects, preserve_rng, world_size
from ..fsdp_unshard import unsharded
from ..monitoring.throughput import ThroughputMeter


class LiveServer(Protocol):
    """The server that `serve` returns."""

    when: Literal["step", "evaluation"] | None
    training_step: int | None
    """The optimizer steps so far, set after every step: requests may come at any time."""

    def is_due(self, last: bool = False) -> bool:
        """Return whether requests wait that may run now."""
        ...

    def pause(self) -> AbstractContextManager[None]:
        """Charge the time of a block to the share of requests."""
        ...

    def run_requests(self, step: int, last: bool = False) -> None:
        """Run them, within `pause()`; called on all ranks if the model is sharded."""
        ...

    def close(self) -> None:
        """Stop to listen."""
        ...


def check_server(server: LiveServer) -> LiveServer:
    """Refuse a server that generates in a thread of its own, while the model is trained."""
    if server.when is None:
        raise ValueError("the server does not wait for a training: pass serve(engine, when='step')")
    return server


def answer_requests(
    server: LiveServer,
    step: int,
    model: Any,
    meter: ThroughputMeter | None = None,
    last: bool = False,
) -> None:
    """Run the requests that are due; call it on all ranks after an optimizer step.

    Args:
        server: what `serve` returned on this rank.
        step: the number of optimizer steps so far.
        model: the model in training, if it may be sharded by FSDP2.
        meter: the training's throughput meter, paused meanwhile.
        last: the training has ended, so that all requests that wait are due.
    """
    is_due = server.is_due(last)
    if world_size() > 1 and any(isinstance(module, FSDPModule) for module in model.modules()):
        is_due = gather_objects(is_due)[0]
    if not is_due:
        return
    paused = nullcontext() if meter is None else meter.paused()
    with server.pause(), preserve_rng(), paused, unsharded(model), draw_stream("live requests"):
        server.run_requests(step, last)
