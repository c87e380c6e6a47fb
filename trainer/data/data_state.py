"""Save and load the data position of a checkpoint: one JSON file merged from all ranks.

Ranks of a sharded stream have different cursors, so saving is a collective: call it on all ranks.
The file holds its own checksum and is written atomically. It also counts the calls of generation
that have drawn random numbers, so that a resumed run draws the same numbers as an uninterrupted
one, the packs per optimizer step over all ranks, so that a resumed run can report a change, and
whether the layers were compiled, so that it trains the same ones.

For checkpoints of `torch.distributed.checkpoint`, synchronous or not, use a `DataState`:

    state = {"model": model, "optimizer": optimizer, "data": DataState(loader)}
    dcp.save(state, checkpoint_id=folder)           # or dcp.async_save(..., process_group=saving)
    dcp.load(state, checkpoint_id=folder)           # on any number of ranks

An asynchronous save exchanges data while the training does, so it needs a separate process group:
`saving = dist.new_group(backend="gloo")`.
"""

from __future__ import annotations

from pathlib import Path

from ...packing.state import decode_state, encode_state, merge_states, read_state, write_state
from ...runtime import (
    barrier,
    draw_counts,
    gather_objects,
    load_draw_counts,
    merge_draw_counts,
    rank,
)
from .loader import PackedLoader

STATE_FILE = "nopad_data.json"
STATE_KEY = "nopad_data"
"""Key of the state in checkpoints of `torch.distributed.checkpoint`."""
DRAWS = "draws"
"""Key of the counters of generation in a merged state."""
PACKS_PER_STEP = "packs_per_step"
"""Key of the number of packs in an optimizer step, over all ranks, in a merged state."""

LAYERS = "layers"
"""Key of the layers that trained, compiled or stock, in a merged state."""


def gather_data_state(loader: PackedLoader | None, state: dict | None = None) -> dict:
    """Merge the states of all ranks into the one state of the run; call it on every rank.

    state: this rank's state; default: the loader's.
    """
    own = loader.state() if loader is not None and not state else state
    states, counts = zip(*gather_objects((own, draw_counts())), strict=True)
    size = None if loader is None else loader.packs_per_step
    merged = {**merge_states(list(states)), DRAWS: merge_draw_counts(counts)}
    return {**merged, PACKS_PER_STEP: size, LAYERS: None if loader is None else loader.layers}


def restore_draws(state: dict) -> dict:
    """Continue the draws of a merged state; return the position of the data in it."""
    load_draw_counts(state.get(DRAWS, {}))
    return {k: v for k, v in state.items() if k not in (DRAWS, PACKS_PER_STEP, LAYERS)}


def load_merged_state(loader: PackedLoader, state: dict) -> None:
    """Continue a merged state, from the next iteration on."""
    loader.load_state(restore_draws(state))
    loader.saved_packs_per_step = state.get(PACKS_PER_STEP)
    loader.layers = state.get(LAYERS)


def save_data_state(
    loader: PackedLoader, folder: Path, state: dict | None = None, name: str = STATE_FILE
) -> None:
    """Write the data state into a checkpoint folder; call it on every rank."""
    merged = gather_data_state(loader, state)
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_state(folder / name, merged)
    barrier()


def load_data_state(loader: PackedLoader, folder: Path, name: str = STATE_FILE) -> None:
    """Continue the data at the position of a checkpoint."""
    path = folder / name
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {name}: it was saved without packed data, or its save was "
            "interrupted; choose another checkpoint, or start from its weights and its optimizer "
            "as docs/data/resume.md shows (From a checkpoint of another trainer)"
        )
    load_merged_state(loader, read_state(path, fall_back=False))


class DataState:
    """The data position of a loader as a `Stateful` of `torch.distributed.checkpoint`.

    `dcp` stores one value of each name, from any rank, so every rank returns the state of the whole
    run. The state is taken when a save begins; an asynchronous save writes it later.

    Args:
        loader: the loader that the training iterates.
    """

    def __init__(self, loader: PackedLoader):
        self.loader = loader

    def state_dict(self) -> dict[str, str]:
        """Return the state after the last step; call it on every rank, as `dcp` does."""
        return {STATE_KEY: encode_state(gather_data_state(self.loader)).decode()}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Continue at the `state` of a checkpoint, from the next iteration on."""
        load_merged_state(self.loader, decode_state(state[STATE_KEY].encode()))
