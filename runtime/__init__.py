"""Ranks, collectives, layouts, random states and unwrapping, for training and generation."""

from .collectives import (
    RankError,
    all_ranks_or_none,
    barrier,
    gather_objects,
    join_sequence_group,
    sum_over_ranks,
)
from .draw_streams import (
    draw_counts,
    draw_stream,
    load_draw_counts,
    merge_draw_counts,
    number_call,
)
from .fsdp_hooks import fsdp_hook_ids
from .host_copy import HostCopy, to_device
from .layout import Axis, Layout
from .layout_detection import data_rank_and_size, find_layout, is_current, replica_mesh
from .out_of_memory import is_out_of_memory
from .ranks import destroy_group, init_group, rank, world_size
from .rng_state import gather_rng_states, load_rng_states, preserve_rng, rng_states
from .stock_modules import STOCK_CLASS, global_of, rebind_global, rms_norm_eps, stock_class
from .unwrap_model import unwrap_model, unwrap_peft

__all__ = [
    "STOCK_CLASS",
    "Axis",
    "HostCopy",
    "Layout",
    "RankError",
    "all_ranks_or_none",
    "barrier",
    "data_rank_and_size",
    "destroy_group",
    "draw_counts",
    "draw_stream",
    "find_layout",
    "fsdp_hook_ids",
    "gather_objects",
    "gather_rng_states",
    "global_of",
    "init_group",
    "is_current",
    "is_out_of_memory",
    "join_sequence_group",
    "load_draw_counts",
    "load_rng_states",
    "merge_draw_counts",
    "number_call",
    "preserve_rng",
    "rank",
    "rebind_global",
    "replica_mesh",
    "rms_norm_eps",
    "rng_states",
    "stock_class",
    "sum_over_ranks",
    "to_device",
    "unwrap_model",
    "unwrap_peft",
    "world_size",
]
