"""URIs in a job file."""

import os
import re
from pathlib import Path
from urllib.parse import unquote

from batchinfer.records import ConfigError

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # a scheme of one letter would be a drive
_VARIABLE = re.compile(r"\$\{(\w+)\}")


def is_uri(text: str) -> bool:
    """Return whether a text is a URI, such as s3://bucket/key, and not a path."""
    return _URI.match(text) is not None


def expand_path(what: str, text: str, folder: Path) -> str:
    """Return a path with a leading `~` and with environment variables replaced.

    A path that exists as it is written stays so, and URIs do, too.

    Args:
        what: the key of the job file, for messages.
        folder: from which relative paths count.

    Raises:
        ConfigError: a variable ${NAME} is not set, or there is no such user.
    """
    if is_uri(text) or not ("$" in text or text.startswith("~")) or os.path.lexists(folder / text):
        return text
    found = os.path.expanduser(os.path.expandvars(text))
    if missing := _VARIABLE.search(found):
        raise ConfigError(
            f"{what} names the environment variable {missing[1]}, which is not set; set it or write the path"
        )
    if found.startswith("~"):
        raise ConfigError(f"{what} is {text!r}, but there is no user of this name; write the path")
    return found


def local_path(what: str, text: str) -> str:
    """Return the path in a file:// URI; any other text unchanged."""
    if not text.startswith("file://"):
        return text
    host = text.removeprefix("file://").partition("/")[0]
    if host not in ("", "localhost"):
        raise ConfigError(f"{what} names the host {host} in {text}; write file:///path, with three slashes")
    return unquote(text.removeprefix(f"file://{host}"))


def refuse_credentials(what: str, text: str) -> None:
    """Raise ConfigError for a URI with credentials, which would be copied to the run folder and to messages."""
    scheme, _, rest = text.partition("://")
    host = rest.partition("/")[0]
    # a secret key may hold a slash, and no bucket's name a colon
    is_secret = set(host) & {":", "@"} if scheme in ("s3", "gs") else ":" in host.rpartition("@")[0]
    if is_uri(text) and is_secret and scheme != "github":  # github://owner:repository@branch
        raise ConfigError(
            f"{what} holds credentials in a {scheme}:// URI; take them out: they belong into the environment or a "
            "profile, for s3 into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
