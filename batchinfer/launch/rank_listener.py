"""Where ranks call their controller: a port that lets in who knows the token."""

from __future__ import annotations

import queue
import secrets
import socket
import threading

from batchinfer.protocol.channel import Channel
from batchinfer.protocol.handshake import ChannelClosedError, deadline, open_connection, show_token
from batchinfer.protocol.messages import FromRank, Hello, MalformedMessageError, decode_from_rank

HANDSHAKE_S = 30.0  # for a caller to show the token and say which rank it is


class RankListener:
    """A free port of this host. Callers are looked at on a thread each, so that none of them delays the others.

    Args:
        host: the address at which ranks call.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0), backlog=1024)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self.token = secrets.token_hex(16)
        self.callers: queue.Queue[tuple[Channel[FromRank], Hello]] = queue.Queue()
        threading.Thread(target=self._answer, name="rank listener", daemon=True).start()

    def close(self) -> None:
        """Answer no calls any more."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for calls
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(caller,), name="rank greeting", daemon=True).start()

    def _greet(self, caller: socket.socket) -> None:
        connection = open_connection(caller)
        channel = Channel(connection, decode_from_rank)
        try:
            with deadline(connection, HANDSHAKE_S):
                show_token(connection, self.token, is_caller=False)
                hello = channel.receive()
        except (ChannelClosedError, MalformedMessageError):
            hello = None
        if isinstance(hello, Hello):
            self.callers.put((channel, hello))
        else:
            channel.close()
