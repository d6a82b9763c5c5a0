"""An S3 server whose certificate no public authority has signed, as most of one's own have it."""

import datetime
import ipaddress
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from support.jobs import write_job
from support.object_store import credentials, free_port

WORDS = "the server's certificate is not accepted"


def named(name):
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def certificate(name, key, issuer, issuer_key, *extensions):
    """Good from yesterday till tomorrow."""
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    built = x509.CertificateBuilder(
        named(issuer), named(name), key.public_key(), x509.random_serial_number(), now - day, now + day
    )
    for extension in extensions:
        built = built.add_extension(extension, critical=False)
    return built.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A folder with the certificate of an authority, and a server's by it with its key."""
    folder = tmp_path_factory.mktemp("authority")
    own, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    is_authority = x509.BasicConstraints(ca=True, path_length=None)
    (folder / "authority.pem").write_bytes(certificate("authority", own, "authority", own, is_authority))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    (folder / "server.pem").write_bytes(certificate("server", key, "authority", own, address))
    plain = serialization.PrivateFormat.TraditionalOpenSSL
    pem = key.private_bytes(serialization.Encoding.PEM, plain, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(pem)
    return folder


@pytest.fixture(scope="module")
def endpoint(authority):
    """URL of moto's server over TLS, which has no bucket yet."""
    port = free_port()
    files = ["-c", str(authority / "server.pem"), "-k", str(authority / "key.pem")]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), *files]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    try:
        while True:
            try:
                urllib.request.urlopen(f"https://127.0.0.1:{port}/", timeout=5).close()
            except urllib.error.URLError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    break  # it answers, and not even Python believes it
                assert process.poll() is None, f"{command!r} has ended"
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with credentials():
            yield f"https://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def said(*arguments, **environment):
    """Return the output of a separate command, because libraries read the variable once in a process."""
    command = [sys.executable, "-P", "-m", "batchinfer", *map(str, arguments)]
    ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_input_and_run_folder_behind_it_name_the_variable_that_helps(tmp_path, authority, endpoint):
    job = write_job(tmp_path, input={"files": ["s3://data/*.parquet"]}, s3={"endpoint": endpoint})
    ways = [("plan", job), ("status", "s3://data/run")]
    for way in ways:
        line = said(*way, AWS_ENDPOINT_URL_S3=endpoint)
        assert WORDS in line
        assert "SSL_CERT_FILE" in line
    trusted = {"AWS_ENDPOINT_URL_S3": endpoint, "SSL_CERT_FILE": str(authority / "authority.pem")}
    for way in ways:  # now the bucket is missing
        line = said(*way, **trusted)
        assert WORDS not in line
        assert "bucket" in line.lower()


def test_a_server_that_is_not_there_is_named_with_the_reason(endpoint):
    port = free_port()
    line = said("status", "s3://data/run", AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{port}")
    assert f"http://127.0.0.1:{port}: Connection refused" in line
