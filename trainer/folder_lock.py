"""A lock on the folder of a run: a second process that would train in it is refused.

lock = lock_folder(Path("out"))    # on the main process; released when it ends or is killed
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

LOCK_NAME = "run.lock"
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
"""Errors of file systems without locks."""


def lock_folder(folder: Path) -> IO[str]:
    """Lock an existing folder until the returned file is closed, or this process ends.

    The operating system holds the lock, so a killed process releases it, and forked data workers do
    not inherit it. Raises ValueError if another process has it.

    Args:
        folder: the folder to lock; a file `run.lock` in it names the process.
    """
    file = (folder / LOCK_NAME).open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
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
