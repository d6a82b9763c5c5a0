"""Admission to a group: TLS streams, and a port at which strangers call."""

from __future__ import annotations

import os
import queue
import resource
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from batchinfer.net import listener as listener_module
from batchinfer.net.credentials import make_credentials, tls_context
from batchinfer.net.listener import MOST_STRANGERS, Listener
from batchinfer.net.stream import Stream
from batchinfer.net.tls import CHUNK_BYTES, MOST_HANDSHAKE_BYTES, call
from support.networks import HAS_NETWORKS

HOST = "127.0.0.1"
DEADLINE_S = 30.0
START_DELAY_S = 5.0  # the most that strangers may cost
STRANGERS_BYTES = 64 << 20  # the most memory that they may take, however many they are
NOBODY = 65534
AS_ANOTHER_USER = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@pytest.fixture
def credentials():
    return make_credentials()


@pytest.fixture
def listening(credentials):
    """A listener, and the streams that it has let in."""
    met: queue.SimpleQueue[Stream] = queue.SimpleQueue()
    listener = Listener(HOST, credentials, met.put)
    yield listener, met
    listener.close()


@pytest.fixture
def ends(listening, credentials):
    listener, met = listening
    near = call(HOST, listener.port, credentials, DEADLINE_S)
    return near, met.get(timeout=DEADLINE_S)


@contextmanager
def another_user():
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def strangers(listener: Listener, number: int, stack: ExitStack, first_bytes: bytes = b"") -> list[socket.socket]:
    made = [
        stack.enter_context(socket.create_connection((HOST, listener.port), timeout=DEADLINE_S)) for _ in range(number)
    ]
    for stranger in made:
        with suppress(OSError):  # sent away already
            stranger.sendall(first_bytes)
    return made


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def is_sent_away(stranger: socket.socket) -> bool:
    """Whether its connection ends at once; an alert may come before."""
    stranger.settimeout(1.0)
    try:
        while stranger.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True  # reset
    return True


def test_bytes_arrive_in_order_both_ways_at_once(ends):
    near, far = ends
    contents = [os.urandom(num_bytes) for num_bytes in (1, 0, CHUNK_BYTES + 1, 5 * CHUNK_BYTES, 17)] * 5
    senders = [threading.Thread(target=lambda end=end: [end.send(content) for content in contents]) for end in ends]
    for sender in senders:
        sender.start()
    for content in contents:
        assert near.receive(len(content)) == far.receive(len(content)) == content
    for sender in senders:
        sender.join()


def test_who_listens_in_reads_nothing(credentials):
    """A relay between both ends keeps what passes."""
    passed, met = bytearray(), queue.SimpleQueue()
    listener = Listener(HOST, credentials, met.put)
    relay = socket.create_server((HOST, 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                passed.extend(content)
                target.sendall(content)

    def answer() -> None:
        caller = relay.accept()[0]
        called = socket.create_connection((HOST, listener.port))
        for pair in ((caller, called), (called, caller)):
            threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=answer, daemon=True).start()
    near = call(HOST, relay.getsockname()[1], credentials, DEADLINE_S)
    far = met.get(timeout=DEADLINE_S)
    near.send(b"a prompt of somebody" * 100)
    assert far.receive(2000) == b"a prompt of somebody" * 100
    assert len(passed) > 2000
    assert b"prompt" not in passed
    relay.close()
    listener.close()


def test_what_is_changed_on_its_way_ends_the_connection(ends):
    near, far = ends
    records = bytearray()
    near._end, kept = socket.socketpair()
    near.send(b"a message")
    records += kept.recv(1000)
    records[-1] ^= 1
    far._coming.write(records)
    said = r"BAD_RECORD_MAC|bad record mac"
    if ssl.OPENSSL_VERSION_INFO >= (3, 2):  # whose record layer is another one
        said += "|RECORD_LAYER_FAILURE"
    with pytest.raises(ssl.SSLError, match=said):
        far.receive(1)


def test_who_has_other_credentials_is_sent_away_and_trusts_nobody(listening, monkeypatch):
    listener, met = listening
    with pytest.raises(ssl.SSLError):
        call(HOST, listener.port, make_credentials(), DEADLINE_S)
    assert met.empty()


def test_who_has_no_credentials_is_sent_away(listening):
    listener, met = listening
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((HOST, listener.port), timeout=DEADLINE_S) as end,
        context.wrap_socket(end) as tls,
        pytest.raises(ssl.SSLError, match=r"CERTIFICATE_REQUIRED|certificate required"),
    ):
        tls.recv(1)
    assert met.empty()


def test_a_certificate_is_of_no_use_without_its_key(credentials):
    certificate = credentials[credentials.index("-----BEGIN CERTIFICATE") :]
    other_key = make_credentials().partition("-----BEGIN CERTIFICATE")[0]
    with pytest.raises(ValueError, match="no key and certificate"):
        tls_context(other_key + certificate, is_caller=True)


def test_an_older_protocol_is_refused(listening, credentials):
    listener, met = listening
    context = tls_context(credentials, is_caller=True)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection((HOST, listener.port), timeout=DEADLINE_S) as end,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(end)
    assert met.empty()


def test_a_call_that_nobody_answers_says_so():
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        call(HOST, port, make_credentials(), DEADLINE_S)


def test_garbage_is_read_no_further_than_a_handshake_is_long(listening):
    listener, met = listening
    with ExitStack() as stack:
        for first_bytes in (
            os.urandom(4096),
            struct.pack("!i", (1 << 31) - 1) + b"x" * 1000,
            b"GET / HTTP/1.1\r\n\r\n",
        ):
            (stranger,) = strangers(listener, 1, stack, first_bytes)
            assert is_sent_away(stranger)
        # the beginning of a hello of 64 KB
        (stranger,) = strangers(
            listener, 1, stack, b"\x16\x03\x01\x40\x00\x01\x00\xff\xfc" + b"x" * MOST_HANDSHAKE_BYTES
        )
        assert is_sent_away(stranger)
    assert met.empty()


def test_a_handshake_has_one_deadline_however_slowly_bytes_come(monkeypatch, listening):
    monkeypatch.setattr(listener_module, "HANDSHAKE_S", 0.5)
    listener, _ = listening
    begun_s = time.monotonic()
    with ExitStack() as stack:
        (stranger,) = strangers(listener, 1, stack, b"\x16\x03\x01\x02\x00")

        def drip() -> None:
            while time.monotonic() < begun_s + 10:
                stranger.sendall(b"x")
                time.sleep(0.1)

        with pytest.raises(OSError):
            drip()
    assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize("number", [MOST_STRANGERS, 200])
@pytest.mark.parametrize("first_bytes", [b"", b"\x16\x03\x01\x40\x00" + b"x" * 10_000], ids=["silent", "half a hello"])
def test_strangers_neither_keep_the_group_waiting_nor_take_memory(listening, credentials, number, first_bytes):
    listener, met = listening
    before = resident_bytes()
    with ExitStack() as stack:
        made = strangers(listener, number, stack, first_bytes)
        begun_s = time.monotonic()
        streams = [call(HOST, listener.port, credentials, DEADLINE_S) for _ in range(4)]
        far = [met.get(timeout=DEADLINE_S) for _ in streams]
        assert time.monotonic() - begun_s < START_DELAY_S
        assert len(listener._strangers) <= MOST_STRANGERS
        assert resident_bytes() - before < min(STRANGERS_BYTES, number << 20)  # 1 MB for each
        assert len(far) == 4
        for stranger in made:
            stranger.close()


def test_strangers_beyond_the_number_allowed_are_sent_away_at_once(monkeypatch, listening):
    monkeypatch.setattr(listener_module, "HANDSHAKE_S", DEADLINE_S)  # none leaves for that
    listener, _ = listening
    with ExitStack() as stack:
        made = strangers(listener, MOST_STRANGERS + 3, stack)
        end_s = time.monotonic() + DEADLINE_S
        num_away = 0
        while num_away < 3 and time.monotonic() < end_s:
            for stranger in made:
                stranger.setblocking(False)
                with suppress(BlockingIOError):
                    num_away += stranger.recv(1) == b""
                    made.remove(stranger)
                    break
        assert num_away == 3
        assert len(listener._strangers) == MOST_STRANGERS


def test_a_caller_that_is_sent_away_calls_again(monkeypatch, listening, credentials):
    listener, met = listening
    monkeypatch.setattr(listener_module, "MOST_STRANGERS", 0)  # there is no room for a caller
    with ExitStack() as stack:
        (stranger,) = strangers(listener, 1, stack)
        assert is_sent_away(stranger)
        timer = threading.Timer(0.5, lambda: monkeypatch.setattr(listener_module, "MOST_STRANGERS", MOST_STRANGERS))
        timer.start()
        call(HOST, listener.port, credentials, DEADLINE_S)
        timer.join()
    assert met.get(timeout=DEADLINE_S)


@AS_ANOTHER_USER
def test_another_user_reads_no_key_while_it_is_loaded(credentials, monkeypatch):
    """OpenSSL takes the key from a file, for a moment."""
    modes = []
    load = ssl.SSLContext.load_cert_chain

    def look(context, path):
        modes.append(os.stat(path).st_mode & 0o777)
        with another_user(), pytest.raises(PermissionError):
            os.open(path, os.O_RDONLY)
        return load(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", look)
    tls_context(credentials, is_caller=True)
    assert modes == [0o600]


VANISHES = """
import queue, socket, struct, subprocess, time
from batchinfer.net import tls
from batchinfer.net.credentials import make_credentials
from batchinfer.net.listener import Listener

tls.QUIET_S = tls.ASK_S = tls.MOST_ASKED = 1
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
met, credentials = queue.SimpleQueue(), make_credentials()
listener = Listener("127.0.0.1", credentials, met.put)
ends = tls.call("127.0.0.1", listener.port, credentials, 10.0), met.get(timeout=10.0)

def is_under_way(end):  # anything that the other end has not said to have: tcpi_unacked
    return struct.unpack_from("I", end._end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 24)[0]

while any(map(is_under_way, ends)):
    time.sleep(0.01)
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
for end in ends:
    try:
        end.receive(1)
    except TimeoutError as error:
        print(error)
"""


@pytest.mark.skipif(not HAS_NETWORKS, reason="needs root, `unshare` and `ip`, for a network of its own")
def test_a_host_that_vanishes_ends_its_connections_on_both_sides():
    """Its last packet never comes: no bytes are under way, and both ends are silent."""
    command = ["unshare", "--net", sys.executable, "-c", VANISHES]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("timed out") == 2
