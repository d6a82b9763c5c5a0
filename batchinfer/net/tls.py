"""A TLS stream of bytes between hosts, whose two ends have the group's credentials (credentials.py)."""

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from batchinfer.net.credentials import tls_context
from batchinfer.net.stream import Stream

CHUNK_BYTES = 1 << 18  # of TLS: read at once, and put into records at once
MOST_HANDSHAKE_BYTES = 1 << 14  # read from a caller before its credentials are verified; 2 KB are needed
PAUSE_S = (0.05, 0.2)  # before a rejected caller calls again
# a vanished host sends nothing: the system probes the other end of a quiet connection, and ends it without an answer
QUIET_S, ASK_S, MOST_ASKED = 60, 30, 8  # so after 5 minutes; the kernel answers for an end that is only busy or stopped
_WELCOME = b"\x01"  # the listener's reply that it has accepted the caller, which TLS 1.3 does not send


class TlsStream(Stream):
    """An encrypted stream between two ends that have verified each other's credentials.

    OpenSSL works in memory here, under a lock, as one connection must not be read and written at the same time.

    Args:
        context: see tls_context.
        timeout_s: for the other end to prove its credentials, however slowly its bytes arrive.

    Raises:
        OSError: the other end did not.
    """

    def __init__(self, end: socket.socket, context: ssl.SSLContext, *, is_caller: bool, timeout_s: float) -> None:
        super().__init__(end)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MOST_ASKED)
        self._lock = threading.Lock()
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._coming, self._going, server_side=not is_caller)
        self._left_bytes = MOST_HANDSHAKE_BYTES
        self._meet(time.monotonic() + timeout_s, is_caller)
        self.set_timeout(None)

    def send(self, content: bytes | memoryview) -> None:
        """See Stream."""
        view = memoryview(content)
        for start in range(0, len(view), CHUNK_BYTES):
            with self._lock:
                self._tls.write(view[start : start + CHUNK_BYTES])
                records = self._going.read()
            self._end.sendall(records)

    def send_some(self, content: bytes) -> int:
        """Send all bytes, see Stream: half a record that was sent could not be taken back."""
        return 0

    def receive_into(self, room: memoryview) -> int:
        """See Stream."""
        while True:
            with self._lock, suppress(ssl.SSLWantReadError):
                return int(self._tls.read(len(room), room))  # how many, with a buffer
            records = self._end.recv(CHUNK_BYTES)
            if not records:
                return 0
            with self._lock:
                self._coming.write(records)

    def _meet(self, end_s: float, is_caller: bool) -> None:
        self._step(self._tls.do_handshake, end_s)
        if is_caller:
            self._step(lambda: self._tls.read(len(_WELCOME)), end_s)
        else:
            self._step(lambda: self._tls.write(_WELCOME), end_s)

    def _step(self, act: Callable[[], object], end_s: float) -> None:
        """Run a step of OpenSSL; receive bytes from the other end as long as it needs them."""
        while True:
            try:
                act()
                return
            except ssl.SSLWantReadError:
                pass  # OpenSSL needs records of the other end, which are received below
            finally:  # after a failure, too: an alert says why
                self.set_timeout(max(end_s - time.monotonic(), 0.001))
                self._end.sendall(self._going.read())
            records = self._end.recv(self._left_bytes)
            self._left_bytes -= len(records)
            if not records:
                raise ConnectionResetError(
                    "the other end closed the connection, or sent too many bytes, before it proved its credentials"
                )
            self._coming.write(records)


def call(host: str, port: int, credentials: str, timeout_s: float) -> TlsStream:
    """Connect to the other end, again if it rejects this caller because too many strangers call at the same time.

    Raises:
        OSError: no process answers, or the process that answers lacks the credentials.
    """
    context = tls_context(credentials, is_caller=True)
    end_s = time.monotonic() + timeout_s
    while True:
        left_s = max(end_s - time.monotonic(), 0.001)
        try:
            end = socket.create_connection((host, port), timeout=left_s)
            return TlsStream(end, context, is_caller=True, timeout_s=left_s)
        except (ConnectionResetError, BrokenPipeError):
            if time.monotonic() > end_s:
                raise
        time.sleep(random.uniform(*PAUSE_S))
