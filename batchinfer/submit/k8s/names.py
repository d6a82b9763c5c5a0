"""Checks of names and quantities for Kubernetes; a label of RFC 1123 has at most 63 characters of a-z, 0-9 and -."""

import re

from batchinfer.records import ConfigError

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LABEL = re.compile(_LABEL)
SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_NUMBER = r"[0-9]+(\.[0-9]+)?"
PROCESSORS = re.compile(rf"{_NUMBER}m?")
MEMORY = re.compile(rf"{_NUMBER}(k|M|G|T|Ki|Mi|Gi|Ti)")


def check_name(option: str, value: str) -> str:
    """Check the name of a queue, claim or secret and return it.

    Raises:
        ConfigError: `value` is no valid name.
    """
    most = 63 if option == "--queue" else 253  # a queue is named by a label
    if len(value) > most or SUBDOMAIN.fullmatch(value) is None:
        raise ConfigError(
            f"{option} is {value!r}; names in Kubernetes have a-z, 0-9 and - only, with dots between, and {most} "
            "characters at most"
        )
    return value


def check_namespace(value: str) -> str:
    """Check a namespace and return it; a namespace is a part of host names, so it has no dots.

    Raises:
        ConfigError: `value` is no valid namespace.
    """
    if LABEL.fullmatch(value) is None:
        raise ConfigError(
            f"--namespace is {value!r}; namespaces have a-z, 0-9 and - only, no dots, 63 characters at most"
        )
    return value


def check_image(value: str) -> str:
    """Check the name of an image and return it.

    Raises:
        ConfigError: `value` is no image name.
    """
    if IMAGE.fullmatch(value) is None:
        raise ConfigError(f"--image is {value!r}; name one as a node can pull it, registry.example/team/batchinfer:1")
    return value


def check_processors(value: str) -> str:
    """Check a number of processors and return it.

    Raises:
        ConfigError: `value` is no such number.
    """
    if PROCESSORS.fullmatch(value) is None:
        raise ConfigError(f"--cpus is {value!r}; write a number of processors, for example 16")
    return value


def check_memory(value: str) -> str:
    """Check an amount of memory and return it. A unit is required: Kubernetes reads 64 as 64 bytes, and 64m as 0.064.

    Raises:
        ConfigError: `value` is no quantity with a unit.
    """
    if MEMORY.fullmatch(value) is None:
        raise ConfigError(f"--memory is {value!r}; write a quantity of Kubernetes with its unit, for example 64Gi")
    return value


def split_volume(value: str) -> tuple[str, str]:
    """Split CLAIM:PATH into claim and path.

    Raises:
        ConfigError: `value` has another form.
    """
    claim, _, path = value.partition(":")
    if (
        not path.startswith("/")
        or not path.strip("/")
        or ":" in path
        or not path.isprintable()
        or ".." in path.split("/")
    ):
        raise ConfigError(f"--pvc is {value!r}; write CLAIM:PATH, where PATH is the folder to mount it at in each pod")
    return check_name("--pvc", claim), path.rstrip("/")
