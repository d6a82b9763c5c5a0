"""A port for the group's processes on other hosts; it accepts callers with the credentials."""

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from batchinfer.net.credentials import tls_context
from batchinfer.net.tls import TlsStream

HANDSHAKE_S = 3.0  # for a caller to prove its credentials; a rejected one may call again
MOST_STRANGERS = 64  # unverified callers at a time
ACCEPT_AGAIN_S = 0.05


class Listener:
    """A listening port of this host; each caller is verified on a separate thread, so that none delays the others.

    Of more than MOST_STRANGERS unverified callers a random one is rejected at once. So callers who only hold
    connections cannot keep out a process of the group, whose handshake takes milliseconds.

    Args:
        host: the address at which processes of other hosts call.
        accept: called with each verified caller's stream, on a separate thread.
    """

    def __init__(self, host: str, credentials: str, accept: Callable[[TlsStream], None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=1024)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._context = tls_context(credentials, is_caller=False)
        self._accept = accept
        self._lock = threading.Lock()
        self._strangers: list[socket.socket] = []
        self._is_closed = False
        threading.Thread(target=self._answer, name="listener", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._is_closed = True
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for calls
        self._socket.close()

    def _answer(self) -> None:
        while not self._is_closed:
            try:
                caller, _ = self._socket.accept()
            except OSError:  # closed; or a caller that has left, or too many open files: others may still call
                time.sleep(ACCEPT_AGAIN_S)
                continue
            with self._lock:
                self._strangers.append(caller)
                if len(self._strangers) > MOST_STRANGERS:
                    away = self._strangers.pop(random.randrange(len(self._strangers)))
                    with suppress(OSError):  # the caller has left
                        away.shutdown(socket.SHUT_RDWR)  # its thread closes it
            threading.Thread(target=self._meet, args=(caller,), name="handshake", daemon=True).start()

    def _meet(self, caller: socket.socket) -> None:
        try:
            stream = TlsStream(caller, self._context, is_caller=False, timeout_s=HANDSHAKE_S)
        except OSError:
            return  # a stranger
        finally:
            with self._lock, suppress(ValueError):  # rejected meanwhile
                self._strangers.remove(caller)
        self._accept(stream)
