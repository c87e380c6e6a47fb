"""The routes of the Hugging Face hub that read a data set, for the files of a folder."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

NAME = "datasets/owner/name"


class FakeHub(ThreadingHTTPServer):
    """Serves `folder` as the data set owner/name; lists the ranges that it has sent."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.asked, self.fails = folder, [], False
        self.num_requests = 0
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        folder, asked = self.server.folder, self.headers.get("Range")
        if path in (f"/api/{NAME}", f"/api/{NAME}/revision/main"):
            return self._send(json.dumps({"id": "owner/name", "sha": "0" * 40}).encode())
        if path.startswith(f"/api/{NAME}/tree/main"):
            inside = folder / path.removeprefix(f"/api/{NAME}/tree/main").strip("/")
            if not inside.is_dir():
                return self._send(b"{}", 404, {"X-Error-Code": "EntryNotFound"})
            return self._send(json.dumps([self._entry(file) for file in inside.iterdir()]).encode())
        file = folder / path.removeprefix(f"/{NAME}/resolve/main/")
        if path.startswith(f"/{NAME}/resolve/main/") and file.is_file():
            begin, end = 0, file.stat().st_size - 1
            if asked:
                begin, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups())
            self.server.num_requests += 1
            if self.server.fails and self.server.num_requests % 50 == 7:
                return self._send(b"", 503)
            self.server.asked.append((file.name, begin, end + 1))
            return self._send(file.read_bytes()[begin : end + 1], 206 if asked else 200)
        return self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def _entry(self, file: Path) -> dict:
        name = str(file.relative_to(self.server.folder))
        kind = "directory" if file.is_dir() else "file"
        return {"type": kind, "path": name, "oid": "0" * 40, "size": file.stat().st_size}

    def _send(self, body: bytes, status: int = 200, headers: dict = {}) -> None:  # noqa: B006
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serve_hub(folder: Path):
    """Serve a folder until the block ends."""
    server = FakeHub(folder)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
