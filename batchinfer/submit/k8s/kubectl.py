"""Access to a Kubernetes cluster by kubectl, which gets argument lists and standard input, never a shell command."""

import json
import subprocess
from typing import Any

from batchinfer.records import ConfigError

ANSWER_S = 120.0  # timeout; a busy API server may be slow
# messages of kubectl without a configured cluster
_NO_CONTEXT = (
    "current-context is not set",
    "localhost:8080",
    "does not exist for the context",
    "invalid configuration",
)


class Kubectl:
    """kubectl with a context and a namespace; None for kubectl's default."""

    def __init__(self, context: str | None, namespace: str | None) -> None:
        self._options = [] if context is None else [f"--context={context}"]
        self._options += [] if namespace is None else [f"--namespace={namespace}"]

    def check(self) -> None:
        """Check that kubectl is installed and may list Jobs in a cluster.

        Raises:
            ConfigError: kubectl is missing, reaches no cluster or is refused.
        """
        self._answer(["get", "jobs.batch", "--output=name", "--selector=batchinfer/none"])

    def create(self, objects: str) -> None:
        """Create the objects of a YAML stream."""
        self._answer(["create", "--filename=-"], objects)

    def items(self, kind: str, selector: str) -> list[dict[str, Any]]:
        """Return all objects of a kind that match a label selector."""
        found = json.loads(self._answer(["get", kind, f"--selector={selector}", "--output=json"]))
        items: list[dict[str, Any]] = found["items"]
        return items

    def patch(self, kind: str, name: str, change: dict[str, Any]) -> None:
        """Merge `change` into an object."""
        self._answer(["patch", kind, name, "--type=merge", f"--patch={json.dumps(change)}"])

    def delete(self, kind: str, names: list[str]) -> None:
        """Delete objects and their pods, which get SIGTERM and their grace period; missing objects are ignored."""
        for first in range(0, len(names), 200):
            options = ["--ignore-not-found", "--wait=false", "--cascade=background"]
            self._answer(["delete", kind, *options, *names[first : first + 200]])

    def _answer(self, arguments: list[str], text: str | None = None) -> str:
        """Run kubectl and return its standard output.

        Raises:
            ConfigError: kubectl is missing, reaches no cluster, times out or fails; the message has kubectl's output.
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
