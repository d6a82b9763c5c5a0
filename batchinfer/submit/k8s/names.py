"""Checks of names and quantities for Kubernetes; a label of RFC 1123 has at most 63 characters of a-z, 0-9 and -."""

import re

from batchinfer.records import ConfigError

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LABEL = re.compile(_LABEL)
SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NUMBER = r"[0-9]+(\.[0-9]+)?"
# forms of options' values, each with the remedy for another form
FORMS = {
    "--image": (
        re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*"),
        "name one as a node can pull it, registry.example/team/batchinfer:1",
    ),
    # a part of host names, so it has no dots
    "--namespace": (LABEL, "namespaces have a-z, 0-9 and - only, no dots, 63 characters at most"),
    "--cpus": (re.compile(rf"{_NUMBER}m?"), "write a number of processors, for example 16"),
    # with a unit: Kubernetes reads 64 as 64 bytes, and 64m as 0.064
    "--memory": (
        re.compile(rf"{_NUMBER}(k|M|G|T|Ki|Mi|Gi|Ti)"),
        "write a quantity of Kubernetes with its unit, for example 64Gi",
    ),
}


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


def check_form(option: str, value: str) -> None:
    """Check the value of one of these options.

    Raises:
        ConfigError: it has another form.
    """
    form, remedy = FORMS[option]
    if form.fullmatch(value) is None:
        raise ConfigError(f"{option} is {value!r}; {remedy}")


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
