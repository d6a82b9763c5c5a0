"""The connection between a controller and a rank: messages over a stream whose other end is verified.

Both ends read in a separate thread, so that neither ever blocks the other by not reading. Ranks send in one, too,
which makes the bytes while the model computes.
"""

import queue
import struct
import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from batchinfer.net.stream import Stream
from batchinfer.protocol.messages import MalformedMessageError, Message, encode

ReceivedT = TypeVar("ReceivedT")

_LENGTH = struct.Struct("!I")  # before each message, in bytes
_MAX_BYTES = 1 << 30
CLOSE_S = 30.0


class ChannelClosedError(Exception):
    """The other end has closed the connection."""


class Channel(Generic[ReceivedT]):
    """One connection; `send` may be called from any thread.

    Args:
        decode: makes a message of its bytes, or raises MalformedMessageError.
    """

    def __init__(self, stream: Stream, decode: Callable[[bytes | bytearray], ReceivedT]) -> None:
        self._stream = stream
        self._decode = decode
        self._lock = threading.Lock()
        # for the sending thread: messages, or the bytes of some, of which it has `_num_queued`; None ends it
        self._outgoing: queue.SimpleQueue[Message | bytes | None] = queue.SimpleQueue()
        self._encodes_first = False
        self._order, self._num_queued = threading.Lock(), 0
        self._sender: threading.Thread | None = None
        self._is_ending = False

    @property
    def peer_address(self) -> str:
        """Address of the other end; "" for a socket pair."""
        return self._stream.peer_address

    def send(self, message: Message) -> None:
        """Send a message; after `send_on` without `encodes_first` the caller must not change the message any more.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        if self._sender is None:
            self.send_now(message)
        elif not self._sender.is_alive():
            raise ChannelClosedError
        elif self._encodes_first:
            self._send_or_queue(_framed(message))
        else:
            self._outgoing.put(message)

    def send_last(self, message: Message) -> None:
        """Send the last message; the reading thread no longer calls `at_end` when the connection ends."""
        self._is_ending = True
        self.send(message)

    def send_on(self, at_fault: Callable[[Exception], None], *, encodes_first: bool = False) -> None:
        """Start a thread that sends the messages of later `send` calls in order, so that `send` never waits.

        Args:
            at_fault: called in that thread when a message cannot be encoded.
            encodes_first: whether `send` makes the bytes itself, and sends at once what the system takes at once.
        """
        self._encodes_first = encodes_first

        def send() -> None:
            try:
                while (item := self._outgoing.get()) is not None:
                    if not isinstance(item, bytes):
                        self._write(_framed(item))
                        continue
                    self._write(item)
                    with self._order:
                        self._num_queued -= 1
            except ChannelClosedError:
                pass  # the next `send` raises it
            except Exception as error:
                traceback.print_exc()
                at_fault(error)

        sender = threading.Thread(target=send, name="channel sending", daemon=True)
        sender.start()  # there may be none left, and `close` waits for those that run
        self._sender = sender

    def send_now(self, message: Message) -> None:
        """Send a message at once, before any that wait for the sending thread.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        self._write(_framed(message))

    def receive(self) -> ReceivedT:
        """Wait for the next message and return it.

        Raises:
            ChannelClosedError: the other end is gone, or announced more than 1 GB.
            MalformedMessageError: the other end sent bytes that are no message.
        """
        try:
            (num_bytes,) = _LENGTH.unpack(self._stream.receive(_LENGTH.size))
            if num_bytes > _MAX_BYTES:
                raise ChannelClosedError
            content = self._stream.receive(num_bytes)
        except OSError:
            raise ChannelClosedError from None
        return self._decode(content)

    def read_on(self, take: Callable[[ReceivedT], None], at_end: Callable[[Exception], None]) -> None:
        """Start a thread that calls `take` with every message.

        Args:
            at_end: called with the reason when the other end is gone or malformed messages come, or `take` fails.
        """

        def read() -> None:
            try:
                while True:
                    take(self.receive())
            except (ChannelClosedError, MalformedMessageError) as error:
                reason: Exception = error
            except Exception as error:
                traceback.print_exc()
                reason = error
            if not self._is_ending:
                at_end(reason)

        threading.Thread(target=read, name="channel", daemon=True).start()

    def close(self) -> None:
        """End the connection, once all messages are sent or CLOSE_S has passed; the other end's reading ends."""
        self._is_ending = True
        if self._sender is not None:
            self._outgoing.put(None)
            self._sender.join(CLOSE_S)
        self._stream.shut_down()

    def _write(self, frame: bytes) -> None:
        try:
            with self._lock:
                self._stream.send(frame)
        except OSError:
            raise ChannelClosedError from None

    def _send_or_queue(self, frame: bytes) -> None:
        with self._order:
            if self._num_queued == 0:
                try:
                    frame = frame[self._stream.send_some(frame) :]
                except OSError:
                    raise ChannelClosedError from None
            if frame:
                self._num_queued += 1
                self._outgoing.put(frame)


def _framed(message: Message) -> bytes:
    content = encode(message)
    return _LENGTH.pack(len(content)) + content
