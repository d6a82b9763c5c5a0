"""A node of Kubernetes without containers: a pod is the process that its manifest says.

It starts what the pod's command, args and env say, with $(NAME) and fieldRef as a node resolves them. A pod that is
deleted gets SIGTERM, and SIGKILL after its grace period; its exit code is a container's, 137 for SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

Object = dict[str, Any]

INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
IGNORED = "batch.kubernetes.io/job-index-ignored-failure-count"


class Pod:
    """A pod and its process."""

    def __init__(self, manifest: Object, folder: Path) -> None:
        self.metadata, self.spec = manifest["metadata"], manifest["spec"]
        self.name = self.metadata["name"]
        self.job = self.metadata["labels"]["job-name"]
        self.index = int(self.metadata.get("annotations", {}).get(INDEX, 0))
        self.is_deleted = False
        self._kill_by: float | None = None
        self._log = folder / f"{self.name}.log"
        container = self.spec["containers"][0]
        values = self._variables(container)
        command = [expanded(word, values) for word in [*container["command"], *container["args"]]]
        with open(self._log, "wb") as file:
            self.process = subprocess.Popen(command, env=values, stdout=file, stderr=file, start_new_session=True)

    @property
    def task(self) -> str:
        return f"{self.job}-{self.index}"

    @property
    def counts(self) -> tuple[int, int]:
        """Failures of this index before this pod: counted ones, and ignored ones."""
        found = self.metadata["annotations"]
        return int(found.get(FAILURES, 0)), int(found.get(IGNORED, 0))

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def exit_code(self) -> int | None:
        """The exit code, None while the pod runs. All processes of the pod end with its first one."""
        code = self.process.poll()
        if code is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return code if code >= 0 else 128 - code

    @property
    def phase(self) -> str:
        return "Running" if self.exit_code is None else "Failed" if self.exit_code else "Succeeded"

    def stop(self) -> None:
        """Stop the pod as a deletion does."""
        self.is_deleted = True
        if self.exit_code is None and self._kill_by is None:
            self._kill_by = time.monotonic() + self.spec.get("terminationGracePeriodSeconds", 30)
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the pod as the out-of-memory killer does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def look(self) -> None:
        """Keep to the grace period."""
        if self._kill_by is not None and time.monotonic() > self._kill_by:
            self.kill()

    def _variables(self, container: Object) -> dict[str, str]:
        """Return the image's variables (here: this process's), overridden by the pod's, one after the other."""
        values = {name: value for name, value in os.environ.items() if not name.startswith("BATCHINFER_")}
        for variable in container.get("env", []):
            if "valueFrom" in variable:
                values[variable["name"]] = self._field(variable["valueFrom"]["fieldRef"]["fieldPath"])
            else:
                values[variable["name"]] = expanded(variable.get("value", ""), values)
        return values

    def _field(self, path: str) -> str:
        if path == "spec.nodeName":
            return f"node{self.index}"
        found = re.fullmatch(r"metadata\.(annotations|labels)\['([^']+)'\]", path)
        assert found, path
        return str(self.metadata.get(found[1], {}).get(found[2], ""))


def expanded(text: str, values: dict[str, str]) -> str:
    """$(NAME) as a node reads it; $$ is a plain $, and what names nothing stays."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else values.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)
