"""A small HTTP server beside a running process: /metrics, /healthz and /readyz, and nothing else.

Rule: it reads and never waits for the loop it reports on; a stuck loop is exactly what it has to be able to tell. It
listens on loopback unless told otherwise: what it shows is no secret, but nobody is asked who they are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from onepen.schemas.errors import Fatal

__all__ = ["Verdict", "Watched", "serving"]

log = logging.getLogger("onepen.watch")

REQUEST_S: Final = 10.0
TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer of a probe: good or not, and one line that says why."""

    good: bool
    why: str


@dataclass(frozen=True, slots=True)
class Watched:
    """What is shown. Both questions are asked on the server's threads and must answer at once."""

    collector: Collector
    healthy: Callable[[], Verdict]
    ready: Callable[[], Verdict]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], watched: Watched) -> None:
        self.watched = watched
        self.registry = CollectorRegistry()
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self.registry)
        self.registry.register(watched.collector)
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    protocol_version = "HTTP/1.1"
    server_version = "onepen"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, encode(self.server.registry), content_type)
        elif path in ("/healthz", "/readyz"):
            watched = self.server.watched
            verdict = (watched.healthy if path == "/healthz" else watched.ready)()
            status = HTTPStatus.OK if verdict.good else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(status, f"{verdict.why}\n".encode(), TEXT)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"/metrics /healthz /readyz\n", TEXT)

    do_HEAD = do_GET  # noqa: N815 - the name is http.server's

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
        log.debug(format, *args)


@contextmanager
def serving(host: str, port: int, watched: Watched) -> Iterator[int]:
    """Answer while the block runs; the port (a free one for 0). Raises `Fatal` when it cannot be listened on."""
    try:
        server = _Server((host, port), watched)
    except OSError as error:
        raise Fatal(f"metrics: cannot listen on {host}:{port}: {error.strerror}; set ONEPEN_METRICS_PORT") from None
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="watch", daemon=True)
    thread.start()
    bound: int = server.server_address[1]
    log.info("metrics and probes on http://%s:%d", host, bound)
    try:
        yield bound
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
