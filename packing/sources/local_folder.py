"""`LocalFolder`: a folder with atomic writes and a lock; `open_folder`: that of a path or URL."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..state.state_file import fsync_path
from .remote import RemoteFolder, is_url, local_path

DRAFT, LOCK = ".draft-", ".lock"
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
"""Errors of file systems without locks."""


class LocalFolder:
    """A folder of this machine."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def create(self) -> None:
        """Create the folder."""
        self.path.mkdir(parents=True, exist_ok=True)

    def file(self, name: str, size: int) -> Path:
        """Return a file of this folder."""
        return self.path / name

    def exists(self, name: str) -> bool:
        """Return whether a file of this name exists."""
        return (self.path / name).is_file()

    def sizes(self) -> dict[str, int]:
        """Return the size of each file."""
        if not self.path.is_dir():
            return {}
        with os.scandir(self.path) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        with self.draft() as draft:
            (draft / name).write_bytes(data)

    def remove(self, *names: str) -> None:
        """Remove files, if they exist."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """Yield a folder; its files are moved here if the block ends without an error."""
        draft = Path(tempfile.mkdtemp(prefix=DRAFT, dir=self.path))
        try:
            yield draft
            for file in sorted(draft.iterdir()):
                fsync_path(file)
                file.replace(self.path / file.name)
            fsync_path(self.path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def remove_drafts(self) -> None:
        """Remove the drafts of killed processes; call it only with the lock."""
        for draft in self.path.glob(f"{DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)

    @contextmanager
    def lock(self, shared: bool = False, wait: bool = False) -> Iterator[None]:
        """Hold a lock of the folder; the operating system releases it if the process is killed.

        shared: others may hold the lock as well, if theirs is shared too.
        wait: wait for a lock that another process holds, instead of raising.
        """
        try:
            import fcntl
        except ImportError:  # Windows; two writers of the same job write the same files
            yield
            return
        # Not flock: worker processes would inherit it, and hold it after this one was killed.
        with (self.path / LOCK).open("a+") as file:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            try:
                fcntl.lockf(file, kind if wait else kind | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise ValueError(
                    f"another process is writing to {self}: wait until it ends, or pass another "
                    "folder"
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield


Folder = LocalFolder | RemoteFolder


def open_folder(place: str | os.PathLike) -> Folder:
    """Return the folder of a path or URL; it need not exist."""
    if is_url(place):
        path = local_path(place)
        return RemoteFolder(place) if path is None else LocalFolder(path)
    return LocalFolder(Path(os.path.abspath(os.path.expanduser(place))))
