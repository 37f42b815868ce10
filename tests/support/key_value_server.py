"""A server as horovodrun's: PUT and GET of /scope/key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serve_values() -> Iterator[int]:
    """Serve on the port that comes out, as long as the context lasts."""
    values: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200, b"")

        def do_GET(self) -> None:
            value = values.get(self.path)
            self._answer(404 if value is None else 200, value or b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
