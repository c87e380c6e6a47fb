"""`RemoteFolder`: read and write the files of a folder behind a URL, as `LocalFolder` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from .filesystem import MissingFileError, filesystem, retry, shown
from .listing import exists
from .remote_file import RemoteFile

BUCKETS = {"s3", "gs"}


class RemoteFolder:
    """The counterpart of `LocalFolder`; it has no locks."""

    def __init__(self, url: str, listed: Mapping[str, int] | None = None):
        """listed: the size of each file, if they were listed."""
        self.url, self.listed = url.rstrip("/"), listed

    def __str__(self) -> str:
        return shown(self.url)

    def create(self) -> None:
        """Create the folder where the file system has folders."""
        fs, path = filesystem(self.url)
        if not BUCKETS.isdisjoint([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol):
            return  # `makedirs` would create a bucket whose name is misspelled
        retry(self.url, lambda: fs.makedirs(path, exist_ok=True))

    def file(self, name: str, size: int) -> RemoteFile:
        """Return a file of this folder; size: what it should have, if files were not listed."""
        found = size if self.listed is None else self.listed.get(name, 0)
        return RemoteFile(f"{self.url}/{name}", found)

    def exists(self, name: str) -> bool:
        """Return whether a file of this name exists."""
        return exists(f"{self.url}/{name}")

    def sizes(self) -> dict[str, int]:
        """Return the size of each file."""
        fs, path = filesystem(self.url)
        try:
            found = retry(self.url, lambda: fs.ls(path, detail=True, refresh=True))
        except MissingFileError:
            return {}
        return {entry["name"].rpartition("/")[2]: int(entry["size"] or 0) for entry in found}

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        if not self.exists(name):
            return None
        fs, path = filesystem(f"{self.url}/{name}")
        return retry(f"{self.url}/{name}", lambda: fs.cat_file(path))

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        fs, path = filesystem(f"{self.url}/{name}")
        retry(f"{self.url}/{name}", lambda: fs.pipe_file(path, data))

    def remove(self, *names: str) -> None:
        """Remove files, if they exist."""
        for name in names:
            fs, path = filesystem(f"{self.url}/{name}")
            if self.exists(name):
                retry(f"{self.url}/{name}", lambda fs=fs, path=path: fs.rm_file(path))

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """Yield a local folder; its files are moved here if the block ends without an error."""
        with TemporaryDirectory(prefix="nopad-") as folder:
            yield Path(folder)
            for file in sorted(Path(folder).iterdir()):
                fs, path = filesystem(f"{self.url}/{file.name}")
                retry(f"{self.url}/{file.name}", lambda fs=fs, p=path, f=file: fs.put_file(f, p))

    @contextmanager
    def lock(self, shared: bool = False, wait: bool = False) -> Iterator[None]:
        """Do nothing: two writers of the same job write the same files."""
        yield
