"""The throw-away key of one group of hosts: a process that has it belongs to the group.

The controller makes one key with a self-signed certificate for each meeting. Both ends of a connection present that
certificate and accept no other (mutual TLS 1.3). An eavesdropper learns nothing, and a caller without it is rejected.
"""

import datetime
import ssl
import tempfile

_NAME = "batchinfer"
# no expiry, as clocks of hosts may differ: the certificate is a secret of one run and ends with it
_SINCE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)  # "no end" (RFC 5280, 4.1.2.5)


def make_credentials() -> str:
    """Make a new key (ECDSA, P-256) and its certificate, as PEM; the result is a secret."""
    # takes long to import, and most runs are on one host
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), _SINCE, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return (secret + certificate.public_bytes(pem)).decode()


def tls_context(credentials: str, *, is_caller: bool) -> ssl.SSLContext:
    """Return the TLS context of one end, which accepts only these credentials of the other end.

    Raises:
        ValueError: the text is no credentials.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_caller else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is trusted itself, whichever host shows it
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=credentials)
        with tempfile.NamedTemporaryFile("w", prefix="batchinfer-") as file:  # only this user can read it
            file.write(credentials)
            file.flush()
            context.load_cert_chain(file.name)  # takes nothing but files
    except ssl.SSLError as error:
        raise ValueError(f"no key and certificate: {error}") from None
    if not is_caller:
        context.num_tickets = 0  # sessions are never resumed
    return context
