"""The outside world of the story: a small HTTP server that sends mails, with a ledger of its own.

It honours idempotency keys: a key that it knows is answered with the first mail's number and nothing is sent again.
It trusts nobody, so its ledger is evidence: one line per call that reached it, whoever the caller was.
"""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from onepen.demo.checks import Effect

__all__ = ["MailServer", "send"]

BODY_BYTES_MAX = 64 * 1024
CALL_TIMEOUT_S = 5.0
_MEMBERS = ("sessionId", "runId", "name", "actionKey", "argsDigest")


class MailServer:
    """Serves on the loopback interface while entered. `ledger()` is a copy, safe at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ledger: list[Effect] = []
        self._sent: dict[tuple[str, str, str], int] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="mail-server")

    @property
    def address(self) -> str:
        """host:port"""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def __enter__(self) -> MailServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def ledger(self) -> list[Effect]:
        """Every call so far, in order of arrival."""
        with self._lock:
            return list(self._ledger)

    def receive(self, call: dict[str, Any]) -> dict[str, Any]:
        """Book one call; the answer says which mail it is and whether this call sent it. Raises `ValueError`."""
        texts = [call.get(name) for name in _MEMBERS]
        generation = call.get("generation")
        if not all(isinstance(text, str) for text in texts) or not isinstance(generation, int):
            raise ValueError("members missing: " + ", ".join((*_MEMBERS, "generation")))
        session, run, name, key, digest = (str(text) for text in texts)
        with self._lock:
            number = len(self._ledger) + 1
            mail = self._sent.setdefault((session, name, key), number)
            self._ledger.append(Effect(number, session, run, generation, name, key, digest, mail == number))
        return {"mail": f"mail-{mail}", "sent": mail == number}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                try:
                    length = int(self.headers.get("content-length", "0"))
                    if not 0 < length <= BODY_BYTES_MAX:
                        raise ValueError("a body of 1 byte to 64 KiB is expected")
                    call = orjson.loads(self.rfile.read(length))
                    if not isinstance(call, dict):
                        raise ValueError("a JSON object is expected")
                    status, answer = 200, server.receive(call)
                except ValueError as error:
                    status, answer = 400, {"error": str(error)}
                body = orjson.dumps(answer)
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """The ledger is the log."""

        return Handler


def send(address: str, call: dict[str, Any]) -> dict[str, Any]:
    """Ask the server at `address` to send a mail. Raises `RuntimeError` when it refuses, `OSError` when it is away."""
    connection = http.client.HTTPConnection(address, timeout=CALL_TIMEOUT_S)
    try:
        connection.request("POST", "/mails", orjson.dumps(call), {"content-type": "application/json"})
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"the mail server answered {response.status}: {body.decode(errors='replace')}")
    answer: dict[str, Any] = orjson.loads(body)
    return answer
