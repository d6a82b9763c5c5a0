"""Names and quantities that Kubernetes takes: labels of RFC 1123 have a-z, 0-9 and -, 63 at most."""

import re

from batchinfer.records import ConfigError

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LABEL = re.compile(_LABEL)
SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


def check_name(option: str, value: str, form: re.Pattern[str] = SUBDOMAIN) -> str:
    """A namespace, queue, claim or secret.

    Raises:
        ConfigError: Kubernetes has no such names.
    """
    if len(value) > 253 or form.fullmatch(value) is None:
        raise ConfigError(f"{option} is {value!r}; names in Kubernetes have a-z, 0-9 and - only, with dots between")
    return value


def check_image(value: str) -> str:
    """An image's name.

    Raises:
        ConfigError: it is none.
    """
    if IMAGE.fullmatch(value) is None:
        raise ConfigError(f"--image is {value!r}; name one as a node can pull it, registry.example/team/batchinfer:1")
    return value


def check_quantity(option: str, value: str) -> str:
    """So many processors, or so much memory.

    Raises:
        ConfigError: it is no quantity.
    """
    if QUANTITY.fullmatch(value) is None:
        raise ConfigError(f"{option} is {value!r}; write a quantity of Kubernetes, for example 16 or 64Gi")
    return value


def split_volume(value: str) -> tuple[str, str]:
    """Claim and path of CLAIM:PATH.

    Raises:
        ConfigError: it is something else.
    """
    claim, _, path = value.partition(":")
    if not path.startswith("/") or path == "/" or ":" in path or not path.isprintable() or ".." in path.split("/"):
        raise ConfigError(f"--pvc is {value!r}; write CLAIM:PATH, where PATH is the folder to mount it at in each pod")
    return check_name("--pvc", claim), path.rstrip("/")
