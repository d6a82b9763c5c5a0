"""A Kubernetes in this process: objects in memory, the Job controller's rules, and nodes whose pods are processes.

The rules are those of the Job API (Indexed, backoffLimit, backoffLimitPerIndex, podFailurePolicy, elastic) and of
JobSet's failure policy, as their documentation says; `real_kubernetes` has the controller itself. A small program
called `kubectl` asks this process over HTTP, so that the product's own calls are the ones that run.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from support.kubelet import FAILURES, IGNORED, INDEX, Object, Pod

ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"

KUBECTL = """#!{python}
import sys, urllib.request, json
stdin = sys.stdin.read() if "--filename=-" in sys.argv else ""
body = json.dumps({{"arguments": sys.argv[1:], "stdin": stdin}}).encode()
answer = json.load(urllib.request.urlopen("http://127.0.0.1:{port}", body))
sys.stdout.write(answer["out"])
sys.stderr.write(answer["err"])
sys.exit(answer["code"])
"""


class Job:
    """A Job, and what its controller has counted."""

    def __init__(self, manifest: Object, cluster: SimulatedKubernetes, labels: dict[str, str] | None = None) -> None:
        self.manifest, self.name = manifest, manifest["metadata"]["name"]
        self.pods: list[Pod] = []
        self.condition: tuple[str, str] | None = None  # 'Complete' or 'Failed', and the reason
        self.is_deleted = False
        self._cluster, self._labels = cluster, labels or {}  # for its pods
        self._succeeded: set[int] = set()
        self._failed: set[int] = set()
        self._failures: dict[int, int] = {}
        self._ignored: dict[int, int] = {}

    @property
    def spec(self) -> Object:
        return self.manifest["spec"]

    @property
    def num_indexes(self) -> int:
        return int(self.spec.get("completions", 1))

    def look(self) -> None:
        """One turn of the controller."""
        for pod in self.pods:
            pod.look()
        for pod in [pod for pod in self.pods if pod.exit_code is not None]:
            self.pods.remove(pod)
            if not self.condition and pod.index < self.num_indexes:
                self._count(pod)
        for pod in self.pods:
            if self.is_deleted or self.condition or pod.index >= self.num_indexes:
                pod.stop()
        if not self.is_deleted and not self.condition:
            self._start_missing()
            if len({index for index in self._succeeded | self._failed if index < self.num_indexes}) == self.num_indexes:
                self.condition = ("Failed", "FailedIndexes") if self._failed else ("Complete", "CompletionsReached")

    def _count(self, pod: Pod) -> None:
        if not pod.exit_code:
            self._succeeded.add(pod.index)
            return
        action = self._action(pod)
        if action == "FailJob":
            self.condition = ("Failed", "PodFailurePolicy")
        elif action == "FailIndex":
            self._failed.add(pod.index)
        elif action == "Ignore":
            self._ignored[pod.index] = self._ignored.get(pod.index, 0) + 1
        else:
            self._failures[pod.index] = self._failures.get(pod.index, 0) + 1
            per_index = self.spec.get("backoffLimitPerIndex")
            if per_index is not None and self._failures[pod.index] > per_index:
                self._failed.add(pod.index)
            if sum(self._failures.values()) > self.spec.get("backoffLimit", 6 if per_index is None else 2**31 - 1):
                self.condition = ("Failed", "BackoffLimitExceeded")

    def _action(self, pod: Pod) -> str:
        """The first rule of the podFailurePolicy that fits."""
        for rule in self.spec.get("podFailurePolicy", {}).get("rules", []):
            codes = rule.get("onExitCodes")
            if codes is not None and (pod.exit_code in codes["values"]) == (codes["operator"] == "In"):
                return str(rule["action"])
            types = {found["type"] for found in rule.get("onPodConditions", [])}
            if "DisruptionTarget" in types and pod.name in self._cluster.disrupted:
                return str(rule["action"])
        return "Count"

    def _start_missing(self) -> None:
        taken = {pod.index for pod in self.pods} | self._succeeded | self._failed
        for index in range(self.num_indexes):
            if index not in taken and len(self.pods) < self.spec.get("parallelism", 1):
                manifest = deepcopy(self.spec["template"])
                metadata = manifest.setdefault("metadata", {})
                metadata["name"] = f"{self.name}-{index}-{len(self._cluster.started):05d}"
                metadata.setdefault("labels", {}).update({**self._labels, "job-name": self.name})
                counts = {FAILURES: str(self._failures.get(index, 0)), IGNORED: str(self._ignored.get(index, 0))}
                per_index = counts if "backoffLimitPerIndex" in self.spec else {}
                metadata.setdefault("annotations", {}).update({INDEX: str(index), **per_index})
                self.pods.append(Pod(manifest, self._cluster.folder))
                self._cluster.started.append(self.pods[-1])

    def as_object(self) -> Object:
        condition = self.condition and [{"type": self.condition[0], "status": "True", "reason": self.condition[1]}]
        return {**_metadata(self), "spec": self.spec, "status": {"conditions": condition or []}}


class JobSet:
    """One replicated Job, recreated by the failure policy when it fails."""

    def __init__(self, manifest: Object, cluster: SimulatedKubernetes) -> None:
        self.manifest, self.name = manifest, manifest["metadata"]["name"]
        self.restarts = self.counted = 0
        self.condition: tuple[str, str] | None = None
        self.is_deleted = False
        self._cluster = cluster
        self._old: list[Job] = []
        self._job = self._make()

    @property
    def pods(self) -> list[Pod]:
        return [pod for job in [*self._old, self._job] for pod in job.pods]

    def _make(self) -> Job:
        (replicated,) = self.manifest["spec"]["replicatedJobs"]
        metadata = {"name": f"{self.name}-{replicated['name']}-0"}
        labels = {ATTEMPT: str(self.restarts)}
        return Job({"metadata": metadata, "spec": replicated["template"]["spec"]}, self._cluster, labels)

    def look(self) -> None:
        """Run one turn of the controller: recreate a failed Job, which begins when the last one's pods are gone."""
        for job in self._old:
            job.look()
        self._old = [job for job in self._old if job.pods]
        self._job.is_deleted = self.is_deleted
        if not self._old:
            self._job.look()
        if self.condition or self.is_deleted or self._job.condition is None:
            return
        kind, reason = self._job.condition
        policy = self.manifest["spec"]["failurePolicy"]
        fitting = [rule for rule in policy.get("rules", []) if reason in rule.get("onJobFailureReasons", [])]
        counts = not fitting or fitting[0]["action"] != "RestartJobSetAndIgnoreMaxRestarts"
        if kind == "Complete":
            self.condition = ("Completed", reason)
        elif counts and self.counted >= policy["maxRestarts"]:
            self.condition = ("Failed", reason)
        else:
            self.counted += counts
            self.restarts += 1
            self._old.append(self._job)
            self._job = self._make()

    def as_object(self) -> Object:
        conditions = [] if self.condition is None else [{"type": self.condition[0], "status": "True"}]
        return {**_metadata(self), "spec": self.manifest["spec"], "status": {"conditions": conditions}}


class SimulatedKubernetes:
    """The cluster, from `start` to `stop`.

    Attributes:
        started: every pod that ever was.
        disrupted: names of those that were evicted.
    """

    def __init__(self, folder: Path, check: Callable[[Object], None]) -> None:
        """`check` raises for an object that the API would not take."""
        self.folder, self._check = folder, check
        self.started: list[Pod] = []
        self.disrupted: set[str] = set()
        self.objects: dict[str, Job | JobSet] = {}
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(cluster.kubectl(asked["arguments"], asked["stdin"])).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._server.serve_forever, self._control)
        ]

    def start(self) -> None:
        """Answer kubectl and run pods; the program `kubectl` is in `folder`/bin."""
        path = self.folder / "bin" / "kubectl"
        path.parent.mkdir(parents=True)
        path.write_text(KUBECTL.format(python=sys.executable, port=self._server.server_port))
        path.chmod(0o755)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Kill all pods and end."""
        self._stopped.set()
        self._threads[1].join()
        self._server.shutdown()
        for pod in self.started:
            pod.kill()
            pod.process.wait()

    def pods(self) -> list[Pod]:
        """Return the pods that have not ended."""
        with self._lock:
            return [pod for found in self.objects.values() for pod in found.pods]

    def evict(self, pod: Pod) -> None:
        """Stop a pod as a drained node does."""
        with self._lock:
            self.disrupted.add(pod.name)
            pod.stop()

    def condition(self, name: str) -> tuple[str, str] | None:
        """Return the end of a Job: 'Complete' or 'Failed', and the reason."""
        found = self.objects.get(name)
        return None if found is None else found.condition

    def jobs(self) -> list[str]:
        """Names of all Jobs and JobSets that are there."""
        with self._lock:
            return list(self.objects)

    def kubectl(self, arguments: list[str], stdin: str) -> Object:
        """Answer one command of kubectl: create, get, patch or delete."""
        with self._lock:
            try:
                return {"code": 0, "out": self._answer(arguments, stdin), "err": ""}
            except Exception as error:  # a server answers whatever it is asked
                return {"code": 1, "out": "", "err": f"Error from server: {error!r}"}

    def _answer(self, arguments: list[str], stdin: str) -> str:
        words = [word for word in arguments if not word.startswith("--")]
        options = dict(word[2:].partition("=")[::2] for word in arguments if word.startswith("--"))
        if words == ["create"]:
            found = list(yaml.safe_load_all(stdin))
            for manifest in found:
                self._check(manifest)
                assert manifest["metadata"]["name"] not in self.objects, "AlreadyExists"
            for manifest in found:
                made = Job(manifest, self) if manifest["kind"] == "Job" else JobSet(manifest, self)
                self.objects[made.name] = made
        elif words[0] == "get":
            return json.dumps({"items": self._selected(words[1], options["selector"])})
        elif words[0] == "patch":
            change = json.loads(options["patch"])["spec"]
            # only where both change to the same number may completions change
            assert change["completions"] == change["parallelism"], "completions: Invalid value: field is immutable"
            self.objects[words[2]].manifest["spec"] |= change
        else:
            assert words[0] == "delete", arguments
            for name in words[2:]:
                if name in self.objects:
                    self.objects[name].is_deleted = True
        return ""

    def _selected(self, kind: str, selector: str) -> list[Object]:
        wanted = dict(part.split("=") for part in selector.split(",") if "=" in part)
        if kind == "pods":
            found = [_metadata(pod) | {"status": {"phase": pod.phase}} for pod in self.pods()]
        else:
            type_of = {"jobs.batch": Job, "jobsets.jobset.x-k8s.io": JobSet}[kind]
            found = [made.as_object() for made in self.objects.values() if isinstance(made, type_of)]
        return [item for item in found if wanted.items() <= item["metadata"].get("labels", {}).items()]

    def _control(self) -> None:
        while not self._stopped.wait(0.05):
            with self._lock:
                for name, found in list(self.objects.items()):
                    found.look()
                    if found.is_deleted and not found.pods:
                        del self.objects[name]


def _metadata(found: Job | JobSet | Pod) -> Object:
    metadata = found.metadata if isinstance(found, Pod) else found.manifest["metadata"]
    return {"metadata": metadata | ({"deletionTimestamp": "now"} if found.is_deleted else {})}
