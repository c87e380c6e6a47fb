"""A web server on localhost for the files of a folder, some of whose replies fail.

Of every `period` requests one fails, in turn with status 500, a connection that is dropped before
the reply, and one that is dropped in the middle of the body.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit


class FlakyServer(ThreadingHTTPServer):
    """Serves `folder`; counts the requests and lists the ranges that were asked for."""

    daemon_threads = True

    def __init__(self, folder: Path, period: int | None = 10, ranges: bool = True):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.period, self.ranges = folder, period, ranges
        self.numbers, self.failures = count(1), count()
        self.num_failures, self.asked = 0, []
        self.down = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Connections that were dropped on purpose are not printed."""


class _Handler(BaseHTTPRequestHandler):
    server: FlakyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._reply(body=False)

    def do_GET(self):
        self._reply(body=True)

    def _reply(self, body: bool) -> None:
        fault = self._fault()
        if fault == "status":
            return self.send_error(500)
        if fault == "drop":
            self.close_connection = True
            return self.connection.close()
        name = unquote(urlsplit(self.path).path).lstrip("/")
        path = self.server.folder / name
        if path.is_dir():
            data = "".join(f'<a href="/{name}{p.name}">x</a>' for p in path.iterdir()).encode()
        elif path.is_file():
            data = path.read_bytes()
        else:
            return self.send_error(404)
        self._send(path.name, data, body, half=fault == "half")

    def _send(self, name: str, data: bytes, body: bool, half: bool) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = 0, len(data)
        if asked and self.server.ranges:
            begin, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        else:
            self.send_response(200)
        if body:
            self.server.asked.append((name, begin, end))
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if body:
            self.wfile.write(data[begin : begin + (end - begin) // 2] if half else data[begin:end])
        if half:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()

    def _fault(self) -> str | None:
        number, period = next(self.server.numbers), self.server.period
        if not self.server.down and (period is None or number % period):
            return None
        self.server.num_failures += 1
        return ("status", "drop", "half")[next(self.server.failures) % 3]


@contextmanager
def serve(folder: Path, **options):
    """Serve a folder until the block ends."""
    server = FlakyServer(folder, **options)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
