"""Open URLs through fsspec's file systems, and repeat requests until they succeed.

Credentials and endpoints come from the environment and from fsspec's own configuration, as each
file system documents them. A file system is looked up for every request: fsspec keeps one per
process, and one that a parent process made does not survive a fork.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import SystemRandom
from typing import Any, TypeGuard, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.core import url_to_fs

T = TypeVar("T")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)")
"""At least two letters before the colon: one is a drive of Windows."""
PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub",
    "http": "aiohttp", "https": "aiohttp", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "oci": "ocifs", "oss": "ossfs",
}  # fmt: skip
ATTEMPTS = 8
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds between attempts: doubled each time, about a minute in all."""
FINAL_ERRORS = (PermissionError, IsADirectoryError, ImportError, ValueError)
TRANSIENT_STATUS = (408, 425, 429)
"""Client errors that may disappear in a later attempt."""


class RemoteReadError(OSError):
    """A request whose attempts all failed; it never counts as a damaged row."""


class MissingFileError(RemoteReadError):
    """A URL without a file."""


def is_url(source: Any) -> TypeGuard[str]:
    """Return whether a source is a URL instead of a path.

    >>> is_url("s3://bucket/data"), is_url("simplecache::gs://bucket"), is_url("C:/data")
    (True, True, False)
    """
    return isinstance(source, str) and URL.match(source) is not None


def local_path(url: str) -> Path | None:
    """Return the path of a `file://` URL; None for all others."""
    protocol, _, path = url.partition("://")
    return Path(unquote(path)) if protocol in ("file", "local") else None


def shown(url: str) -> str:
    """Return a URL for messages, without passwords and signatures.

    >>> shown("https://me:secret@host/a.jsonl?signature=x")
    'https://host/a.jsonl'
    """
    parts = urlsplit(url)
    if not parts.netloc:
        return url
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    protocol = re.split("::|://", url, maxsplit=1)[0].lower()
    try:
        return url_to_fs(url)
    except ImportError as error:
        package = PACKAGES.get(protocol)
        install = f"pip install {package}" if package else str(error)
        raise ImportError(f"{shown(url)}: {protocol}:// needs another package: {install}") from None
    except ValueError as error:
        known = protocol in fsspec.available_protocols()
        reason = error if known else f"fsspec knows no protocol {protocol}://"
        raise ValueError(f"{shown(url)}: {reason}") from None


def retry(url: str, request: Callable[[], T]) -> T:
    """Make a request until it succeeds; raise a RemoteReadError after the last attempt."""
    for attempt in range(ATTEMPTS):
        try:
            return request()
        except RemoteReadError:
            raise
        except Exception as error:  # each file system raises errors of its own libraries
            if not _is_transient(error):
                raise _final_error(url, error) from error
            if attempt == ATTEMPTS - 1:
                raise RemoteReadError(
                    f"{shown(url)}: {ATTEMPTS} attempts failed, the last with {_describe(error)}"
                ) from error
        # Ranks that failed together must not all try again at once.
        longest = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT)
        time.sleep(longest * SystemRandom().uniform(0.5, 1.0))
    raise AssertionError("unreachable")


def _is_transient(error: Exception) -> bool:
    if isinstance(error, FINAL_ERRORS) or "Credentials" in type(error).__name__:
        return False
    if isinstance(error, FileNotFoundError):  # of web servers it is said of any failure
        return isinstance(error.__cause__, Exception) and _is_transient(error.__cause__)
    status = _http_status(error)
    return status is None or not 400 <= status < 500 or status in TRANSIENT_STATUS


def _http_status(error: Exception) -> int | None:
    """Return the status of the reply that an error is about: every library has its own place."""
    reply = getattr(error, "response", None)
    if isinstance(reply, Mapping):  # botocore, for s3
        found = [reply.get("ResponseMetadata", {}).get("HTTPStatusCode")]
    else:
        found = [getattr(error, name, None) for name in ("status", "code")]
        found.append(getattr(reply, "status_code", None))  # huggingface_hub
    return next((status for status in found if isinstance(status, int)), None)


def _final_error(url: str, error: Exception) -> Exception:
    """Return a one-line error for a request that no later attempt can satisfy."""
    if isinstance(error, ImportError):
        return error
    if isinstance(error, FileNotFoundError):
        reason = str(error)  # a path or URL, which may have a signature, or a sentence
        reason = f": {reason}" if " " in reason and "/" not in reason else ""
        return MissingFileError(f"{shown(url)} does not exist{reason}")
    if isinstance(error, PermissionError):
        return RemoteReadError(f"{shown(url)}: access denied: {_describe(error)}")
    return RemoteReadError(f"{shown(url)}: {_describe(error)}")


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
