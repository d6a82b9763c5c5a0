"""A stream of bytes between two processes: a socket pair on one host, or TLS between hosts (tls.py).

A rank that the controller starts inherits its end of a socket pair. No process listens and no other process has an end,
so no credentials are needed.
"""

import socket
from contextlib import suppress


class Stream:
    """A stream of bytes over a connected socket, which this object owns.

    `send` and `receive_into` may run in two threads at once. The socket is closed with the last reference to this
    object: a thread that still reads must not read from another file with the same descriptor.

    All methods raise OSError when the connection is lost, __init__ too.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.peer_address = ""  # of the other end, unless it is that of a socket pair
        if end.family != socket.AF_UNIX:
            self.peer_address = str(end.getpeername()[0])
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __del__(self) -> None:
        self._end.close()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set the timeout of receiving and sending; None: wait for ever."""
        self._end.settimeout(timeout_s)

    def send(self, content: bytes | memoryview) -> None:
        """Send all of these bytes; one thread at a time."""
        self._end.sendall(content)

    def send_some(self, content: bytes) -> int:
        """Send as many bytes as possible without waiting; return their number."""
        try:
            return self._end.send(content, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def receive_into(self, room: memoryview) -> int:
        """Wait for bytes and write them to `room`; return their number, 0 if the other end has ended the connection."""
        return self._end.recv_into(room)

    def receive(self, num_bytes: int) -> bytearray:
        """Wait for this number of bytes.

        Raises:
            OSError: the connection ended too early.
        """
        content = bytearray(num_bytes)
        self.fill(memoryview(content))
        return content

    def fill(self, room: memoryview) -> None:
        """Receive bytes until this buffer is full."""
        while room:
            num_read = self.receive_into(room)
            if num_read == 0:
                raise ConnectionResetError("the other end has ended the connection")
            room = room[num_read:]

    def shut_down(self) -> None:
        """End the connection and wake threads that are reading or sending here, which closing it would not."""
        with suppress(OSError):  # the other end was quicker
            self._end.shutdown(socket.SHUT_RDWR)
