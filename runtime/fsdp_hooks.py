"""The ids of the forward hooks that FSDP2 installed on a module."""

from __future__ import annotations

from typing import Any


def fsdp_hook_ids(module: Any) -> set[int]:
    """Return the ids of the hooks of an FSDP2 module, or of the group it is sharded with.

    Accelerate shards the last norm and the head as one group.
    """
    state = module._get_fsdp_state()
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    return {own.id for handle in handles for own in getattr(handle, "handles", (handle,))}
