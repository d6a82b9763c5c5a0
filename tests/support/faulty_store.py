"""An object store that fails: a proxy before a real S3 server, which injects faults of stores and networks.

    500, 503        an error instead of the request being done (503 with S3's code SlowDown)
    lost            the request is done, and the connection ends before its answer
    timeout         nothing is done and nothing is said until the caller gives up
    late            the connection ends, and the request is done some time afterwards
    stale           a listing as it was some time ago

Requests that write go to moto's server one after the other: it compares and writes a condition in two steps, which is
no fault that S3 has. Ceph's gateway gets them as they come. `requests` counts what callers send, by kind.
"""

from __future__ import annotations

import collections
import http.client
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.object_store import Server

FAULTS = ("500", "503", "lost", "timeout", "late", "stale")
_ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{}</Code><Message>injected</Message></Error>"
_CONDITIONS = ("if-none-match", "if-match")

Reply = tuple[int, list[tuple[str, str]], bytes]  # status, fields, content


@dataclass
class Faults:
    """The faults to inject.

    share: of requests that get a fault, until `most` were injected.
    kinds: of which, one is drawn for each. A fault that does not fit a request becomes a 503.
    hold_s: how long a timeout holds the connection.
    conditions: "honoured", "ignored", "refused" (501), "unmet" (no If-Match holds), "unquoted" (no If-Match with quotes
        holds), "unnamed" (one that does not hold is a 500).
    """

    share: float = 0.0
    most: int | None = None
    kinds: tuple[str, ...] = FAULTS
    hold_s: float = 3.0
    seed: int = 0
    conditions: str = (
        "honoured"  # or "ignored", "refused"; "unmet": no If-Match ever holds; "unquoted": none with quotes
    )
    injected: collections.Counter[str] = field(default_factory=collections.Counter)
    requests: collections.Counter[str] = field(default_factory=collections.Counter)
    written: list[str] = field(default_factory=list)  # paths of the writes that succeeded, in order
    most_writes: int = 0  # that were under way in the server at once

    def __post_init__(self) -> None:
        self._random, self._lock, self._num_writing = random.Random(self.seed), threading.Lock(), 0

    def is_unmet(self, if_match: str | None) -> bool:
        """Whether the proxy itself refuses a condition."""
        if if_match is None:
            return False
        return self.conditions == "unmet" or (self.conditions == "unquoted" and if_match.startswith('"'))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """While a write is under way in the server."""
        with self._lock:
            self._num_writing += 1
            self.most_writes = max(self.most_writes, self._num_writing)
        try:
            yield
        finally:
            with self._lock:
                self._num_writing -= 1

    def draw(self, kind: str) -> str | None:
        """The fault of the next request."""
        with self._lock:
            self.requests[kind] += 1
            if self._random.random() >= self.share or (self.most is not None and self.injected.total() >= self.most):
                return None
            fault = self._random.choice(self.kinds)
            if (fault == "stale") != (kind == "list") and fault in ("stale", "lost", "late"):
                fault = "stale" if kind == "list" and "stale" in self.kinds else "503" if fault == "stale" else fault
            self.injected[fault] += 1
            return fault


class _Listener(ThreadingHTTPServer):
    """The server of the proxy, which can end the connections that its clients keep alive."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._connections: set[Any] = set()  # open sockets

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        """End all open connections: through one that is kept alive, a client could use the store after its end."""
        for connection in list(self._connections):
            with suppress(OSError):  # it has ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """Print nothing when a caller that was killed ends its connection."""


@contextmanager
def faulty_store(server: Server, faults: Faults) -> Iterator[str]:
    """The proxy; yields its URL."""
    writing = nullcontext() if server.is_atomic else threading.Lock()
    closed = threading.Event()
    listings: dict[str, Reply] = {}  # the oldest answer of the last while

    def forward(command: str, path: str, body: bytes, headers: dict[str, str]) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.request(command, path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.getheaders(), reply.read()
        finally:
            connection.close()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            kind = "list" if self.command == "GET" and "list-type=2" in self.path else self.command.lower()
            fault = faults.draw(kind)
            conditions = {name: value for name, value in headers.items() if name.lower() in _CONDITIONS}
            if conditions and faults.conditions == "refused":
                self.say(501, _ERROR.format("NotImplemented").encode())
                return
            if faults.conditions == "ignored":
                headers = {name: value for name, value in headers.items() if name not in conditions}
            if faults.is_unmet(self.headers.get("If-Match")):
                self.say(412, _ERROR.format("PreconditionFailed").encode())
                return
            if fault == "500":
                self.say(500, _ERROR.format("InternalError").encode())
            elif fault == "503":
                self.say(503, _ERROR.format("SlowDown").encode())
            elif fault == "timeout":
                closed.wait(faults.hold_s)
                self.close_connection = True
            elif fault == "late":
                threading.Timer(0.3, self.do, (body, headers)).start()
                self.close_connection = True
            else:
                self.pass_on(kind, fault, body, headers)

        def pass_on(self, kind: str, fault: str | None, body: bytes, headers: dict[str, str]) -> None:
            status, fields, content = self.do(body, headers)
            if fault == "lost":
                self.close_connection = True
                return
            if kind == "list":
                earlier = listings.setdefault(self.path, (status, fields, content))
                if fault == "stale":
                    status, fields, content = earlier
                else:
                    listings[self.path] = status, fields, content
            self.say(status, content, fields)

        def do(self, body: bytes, headers: dict[str, str]) -> Reply:
            if self.command in ("GET", "HEAD"):
                return forward(self.command, self.path, body, headers)
            with writing, faults.counted():
                status, fields, content = forward(self.command, self.path, body, headers)
                if self.command == "PUT" and status == 200:
                    faults.written.append(self.path.partition("?")[0])
            if status == 412 and faults.conditions == "unnamed":
                return 500, [], _ERROR.format("UnknownError").encode()
            return status, fields, content

        def say(self, status: int, content: bytes, fields: list[tuple[str, str]] | None = None) -> None:
            self.send_response(status)
            length = str(len(content))
            for name, value in fields or []:
                if name.lower() == "content-length" and self.command == "HEAD":
                    length = value
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def log_message(self, *_: object) -> None:
            pass

    listener = _Listener(Handler)
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        closed.set()
        listener.shutdown()
        listener.server_close()
        thread.join()
        listener.end_connections()
        time.sleep(0.4)  # what is late has come
