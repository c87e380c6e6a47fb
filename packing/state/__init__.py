"""Saved state: what a run resumes from, checked, merged over ranks and written atomically."""

from .fingerprint import Fingerprint
from .run_state import check_state, merge_states
from .state_file import decode_state, encode_state, fsync_path, read_state, write_state

__all__ = [
    "Fingerprint",
    "check_state",
    "decode_state",
    "encode_state",
    "fsync_path",
    "merge_states",
    "read_state",
    "write_state",
]
