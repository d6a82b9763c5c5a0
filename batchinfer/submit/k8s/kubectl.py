"""Talks to a Kubernetes cluster through kubectl: lists of arguments and standard input, never a shell."""

import json
import subprocess
from typing import Any

from batchinfer.records import ConfigError

ANSWER_S = 120.0  # a busy API server may take its time
# what kubectl says when nothing tells it which cluster is meant
_NO_CONTEXT = (
    "current-context is not set",
    "localhost:8080",
    "does not exist for the context",
    "invalid configuration",
)


class Kubectl:
    """kubectl with a context and a namespace; None: those that it takes by itself."""

    def __init__(self, context: str | None, namespace: str | None) -> None:
        self._options = [] if context is None else [f"--context={context}"]
        self._options += [] if namespace is None else [f"--namespace={namespace}"]

    def check(self) -> None:
        """See that it is here and reaches a cluster in which Jobs may be looked at.

        Raises:
            ConfigError: it is not, or does not.
        """
        self._answer(["get", "jobs.batch", "--output=name", "--selector=batchinfer/none"])

    def create(self, objects: str) -> None:
        """Make the objects of a YAML stream."""
        self._answer(["create", "--filename=-"], objects)

    def items(self, kind: str, selector: str) -> list[dict[str, Any]]:
        """All objects of a kind with these labels."""
        found = json.loads(self._answer(["get", kind, f"--selector={selector}", "--output=json"]))
        items: list[dict[str, Any]] = found["items"]
        return items

    def patch(self, kind: str, name: str, change: dict[str, Any]) -> None:
        """Change some fields of an object."""
        self._answer(["patch", kind, name, "--type=merge", f"--patch={json.dumps(change)}"])

    def delete(self, kind: str, names: list[str]) -> None:
        """Delete objects and their pods, which get SIGTERM and their grace period; those that are gone are left."""
        for first in range(0, len(names), 200):
            options = ["--ignore-not-found", "--wait=false", "--cascade=background"]
            self._answer(["delete", kind, *options, *names[first : first + 200]])

    def _answer(self, arguments: list[str], text: str | None = None) -> str:
        """Standard output of kubectl.

        Raises:
            ConfigError: it is missing, reaches no cluster, does not answer or refuses; the message holds what it said.
        """
        command = ["kubectl", *self._options, *arguments]
        try:
            done = subprocess.run(command, input=text, check=False, capture_output=True, text=True, timeout=ANSWER_S)
        except OSError as error:
            raise ConfigError(
                f"cannot run kubectl ({error.strerror}); install it, or print the manifests with --dry-run"
            ) from None
        except subprocess.TimeoutExpired:
            raise ConfigError(f"kubectl did not answer for {ANSWER_S:g} s; try again when the cluster does") from None
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        if done.returncode and any(words in said for words in _NO_CONTEXT):
            raise ConfigError(
                f"kubectl knows no cluster ({said}); name a context with --context, see `kubectl config get-contexts`"
            )
        if done.returncode:
            raise ConfigError(f"kubectl {arguments[0]} refused: {said or f'exit code {done.returncode}'}")
        return done.stdout
