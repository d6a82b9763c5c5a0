"""Connections between controller and ranks: how each end shows the other that it knows their token.

Frames and the challenge are those of multiprocessing.connection; its pickled objects are not used.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge


class ChannelClosedError(Exception):
    """The other end is gone."""


def open_connection(end: socket.socket) -> Connection:
    """A connection that takes the place of a TCP socket.

    It is closed when nobody has it any more: a thread that still reads must not read what gets its number next.
    """
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(end.detach())


def show_token(connection: Connection, token: str, *, is_caller: bool) -> None:
    """Each end has the other one show by a challenge (HMAC) that it knows the token, which itself is never sent.

    No more than 256 bytes at once are read meanwhile.

    Raises:
        ChannelClosedError: the other end does not know it.
    """
    steps = (answer_challenge, deliver_challenge) if is_caller else (deliver_challenge, answer_challenge)
    try:
        for step in steps:
            step(connection, token.encode())
    except (AuthenticationError, AssertionError, EOFError, OSError):  # AssertionError: what came is no challenge
        raise ChannelClosedError from None


@contextmanager
def deadline(connection: Connection, timeout_s: float) -> Iterator[None]:
    """The connection ends unless this is over in time, however the other end delays it."""
    timer = threading.Timer(timeout_s, shut_down, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def own_host(connection: Connection) -> str:
    """This end's address, as the other end sees it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        return str(end.getsockname()[0])


def shut_down(connection: Connection) -> None:
    """End a connection and wake threads that are reading or sending there, which closing it would not."""
    # OSError: the other end was quicker
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
