"""Files and folders behind URLs, through fsspec: listed, read ahead, written, with retries."""

from .filesystem import RemoteReadError, is_url, local_path, shown
from .listing import exists, list_url
from .read_ahead import prefetch
from .remote_file import RemoteFile, read_together
from .remote_folder import RemoteFolder
from .remote_tokens import RemoteTokens

__all__ = [
    "RemoteFile",
    "RemoteFolder",
    "RemoteReadError",
    "RemoteTokens",
    "exists",
    "is_url",
    "list_url",
    "local_path",
    "prefetch",
    "read_together",
    "shown",
]
