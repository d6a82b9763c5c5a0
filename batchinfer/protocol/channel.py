"""Messages between the controller and its ranks: MessagePack documents over a TCP connection, each after its length.

A message is a dictionary with a "type". Nouns of feed.py and records.py may stand in it as they are; they arrive as
plain dictionaries, of which `part` makes them again.

Both ends read in a thread of their own, so that neither ever blocks the other by not looking. Ranks send in one, too,
which makes the bytes while the model computes.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

Message = dict[str, Any]

PartT = TypeVar("PartT")

_LENGTH = struct.Struct("=I")
_MAX_BYTES = 1 << 30


class ChannelClosedError(Exception):
    """The other end is gone."""


def part(message: Message, name: str, kind: type[PartT]) -> PartT:
    """What stands under a name of a message, as `kind`, such as list[Request]."""
    return msgspec.convert(message[name], kind)


def _plain_number(value: Any) -> object:
    if hasattr(value, "item") and not getattr(value, "shape", ()):  # of numpy, which takes long to import
        return value.item()
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain_number).encode


class Channel:
    """One connection; `send` may be called from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lock = threading.Lock()
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # for the sending thread; None ends it
        self._sender: threading.Thread | None = None
        self._is_ending = False

    @classmethod
    def connect(cls, host: str, port: int, timeout_s: float) -> Channel:
        """Call the other end.

        Raises:
            OSError: nobody answers there.
        """
        connection = socket.create_connection((host, port), timeout=timeout_s)
        connection.settimeout(None)
        return cls(connection)

    @property
    def own_host(self) -> str:
        """This end's address, as the other end sees it."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Message) -> None:
        """Hand a message over; after `send_on` it must not be changed any more.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        if self._sender is None:
            self.send_now(message)
        elif self._sender.is_alive():
            self._outgoing.put(message)
        else:
            raise ChannelClosedError

    def send_last(self, message: Message) -> None:
        """As `send`; from now on the end of the connection is no news, and what reads it calls no `at_end`."""
        self._is_ending = True
        self.send(message)

    def send_on(self, at_fault: Callable[[Exception], None]) -> None:
        """Start a thread that sends what `send` takes from now on, in this order.

        Args:
            at_fault: called in that thread when a message cannot be put into bytes.
        """

        def send() -> None:
            try:
                self._send_outgoing()
            except ChannelClosedError:
                pass  # as the next `send` says
            except Exception as error:
                traceback.print_exc()
                at_fault(error)

        self._sender = threading.Thread(target=send, name="channel sending", daemon=True)
        self._sender.start()

    def _send_outgoing(self) -> None:
        while (message := self._outgoing.get()) is not None:
            self.send_now(message)

    def send_now(self, message: Message) -> None:
        """Send a message here and now, before any that wait for the sending thread.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        content = _encode(message)
        try:
            with self._lock:
                self._connection.sendall(_LENGTH.pack(len(content)) + content)
        except OSError:
            raise ChannelClosedError from None

    def receive(self) -> Message:
        """The next message; waits for it.

        Raises:
            ChannelClosedError: the other end is gone, or sent something else than messages.
        """
        length = _LENGTH.unpack(self._read(_LENGTH.size))[0]
        if length > _MAX_BYTES:
            raise ChannelClosedError
        try:
            message = msgspec.msgpack.decode(self._read(length))
        except msgspec.DecodeError:
            raise ChannelClosedError from None
        if not isinstance(message, dict):
            raise ChannelClosedError
        return message

    def read_on(self, take: Callable[[Message], None], at_end: Callable[[], None]) -> None:
        """Start a thread that calls `take` with every message; `at_end` when the other end is gone or `take` fails."""

        def read() -> None:
            try:
                while True:
                    take(self.receive())
            except ChannelClosedError:
                pass  # an end as good as any other: `at_end` says so
            except Exception:
                traceback.print_exc()
            if not self._is_ending:
                at_end()

        threading.Thread(target=read, name="channel", daemon=True).start()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bound how long `receive` may wait (ChannelClosedError after that); None: for ever."""
        self._connection.settimeout(timeout_s)

    def close(self) -> None:
        """End the connection, once all is sent; the other end's reading ends."""
        self._is_ending = True
        if self._sender is not None:
            self._outgoing.put(None)
            self._sender.join()
        with suppress(OSError):  # the other end was quicker
            # wakes a thread that is reading here, which close alone does not
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        view = memoryview(content)
        while view:
            try:
                count = self._connection.recv_into(view)
            except OSError:
                raise ChannelClosedError from None
            if count == 0:
                raise ChannelClosedError
            view = view[count:]
        return bytes(content)
