"""One process trains in a run folder at a time: the main process of a run holds `run.lock`.

The lock is the operating system's, so that of a process that was killed does not block. Forked data
workers do not inherit it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
"""Set by launchers; the main process has 0 or nothing in all of them."""
UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def is_main_process() -> bool:
    """Return whether this is the main process of the run, before any library knows its rank."""
    return all(os.environ.get(name, "0") == "0" for name in RANK_VARIABLES)


def lock_run(folder: Path) -> IO[str]:
    """Lock a run folder until the file that is returned is closed, or this process ends."""
    file = (folder / "run.lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            print(f"{folder} is on a file system without locks: start one run in it at a time")
            return file
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{folder} is being trained by {owner}: wait until it ends, or stop it first"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    file.flush()
    return file
