"""A real S3 server over HTTP (moto's, a child process), and a gate before it that can hold or refuse requests.

Ceph's is in rgw.py; s3_servers.py gives tests one or the other.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import boto3

SECRET = "not-to-be-written-anywhere"
KEY_ID = "AKIATESTS"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY_ID,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}


@dataclass(frozen=True)
class Server:
    """A running S3 server; this one is moto's.

    is_atomic: whether it compares and writes a condition in one step. moto's does so in two, which S3 does not.
    takes_quotes: whether If-Match may have the quotes that ETags come with.
    minds_versions: whether it compares conditions in buckets that keep versions, too.
    """

    port: int

    is_atomic: ClassVar[bool] = False
    takes_quotes: ClassVar[bool] = True
    minds_versions: ClassVar[bool] = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        return boto3.client("s3", endpoint_url=self.endpoint)

    def make_bucket(self, name: str) -> None:
        self.client().create_bucket(Bucket=name)

    def make_open_bucket(self, name: str) -> None:
        """One that needs no key."""
        self.client().create_bucket(Bucket=name, ACL="public-read-write")

    def keep_versions(self, name: str) -> None:
        """From now on a bucket keeps what was in an object."""
        self.client().put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})

    def upload(self, folder: Path, bucket: str, prefix: str) -> None:
        """Put all files below a folder into the bucket."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(bucket, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self.client().put_object(Bucket=bucket, Key=key, Body=data)

    def objects(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """All objects below a prefix: what follows it in their names -> content."""
        client = self.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        found = [item for page in pages for item in page.get("Contents", [])]
        return {
            item["Key"].removeprefix(f"{prefix}/"): client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
            for item in found
            if not item["Key"].endswith("/")  # empty objects that stand for folders
        }

    def check_permissions(self, *, on: bool) -> None:
        """From now on refuse all keys (it knows no user), or none."""
        data = b"0" if on else b"1000000000"
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset-auth", data, {"Content-Type": "text/plain"})
        urllib.request.urlopen(request).close()


@contextmanager
def s3_server() -> Iterator[Server]:
    """Start the server, with credentials for it in this process's environment."""
    server = Server(free_port())
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(server.port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_it_answers(f"{server.endpoint}/moto-api/", process)
        with credentials():
            yield server
    finally:
        process.kill()
        process.wait()


@contextmanager
def credentials() -> Iterator[None]:
    """The tests' key in this process's environment."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def free_port() -> int:
    """Return a port of this host without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for a server that has just been started."""
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            assert process.poll() is None, f"{process.args!r} has ended; is it installed?"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return


@contextmanager
def gate(server: Server, answer: Callable[[str, str], int | None], *, takes_chunks: bool = True) -> Iterator[str]:
    """A way to the server through which requests go one by one; yields its URL.

    Args:
        answer: called with method and path of each request; None lets it through, a number is the status sent instead.
            It may wait.
        takes_chunks: whether a body may come without its length, which Ceph's gateway refuses.
    """
    closed = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            is_chunked = "Transfer-Encoding" in self.headers
            body = self.chunks() if is_chunked else self.content()
            status = 411 if is_chunked and not takes_chunks else answer(self.command, self.path)
            if closed.is_set():
                self.close_connection = True
                return
            if status is not None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            connection.request(self.command, self.path, body, headers)
            reply = connection.getresponse()
            content = reply.read()
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = reply.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(content)
            connection.close()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

        def content(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def chunks(self) -> bytes:
            """The body as it came: a size in hex before each chunk, the last of size 0, a blank line at the end."""
            body, size = b"", -1
            while size:
                line = self.rfile.readline()
                size = int(line.split(b";")[0], 16)
                body += line + (self.rfile.read(size + 2) if size else self.rfile.readline())
            return body

        def log_message(self, *_: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}"
    finally:
        closed.set()
        listener.shutdown()
        listener.server_close()
        thread.join()
