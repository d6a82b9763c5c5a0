"""The real thing where its programs are: etcd, kube-apiserver and the Job controller; nodes are this process.

Which programs: those in the folder that KUBEBUILDER_ASSETS names, kube-controller-manager among them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from support.kubelet import Object, Pod

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
START_S = 120.0
NAMESPACE = "/api/v1/namespaces/default"

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: test, cluster: {{server: "https://127.0.0.1:{port}", insecure-skip-tls-verify: true}}}}]
users: [{{name: test, user: {{token: {token}}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test, namespace: default}}}}]
current-context: test
"""


class NoKubernetesError(Exception):
    """Kubernetes cannot run on this machine; the text gives the reason."""


class RealKubernetes:
    """The programs, from `start` to `stop`; the same methods as SimulatedKubernetes.

    Attributes:
        started: every pod that ever was.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[Pod]()
        named = os.environ.get("KUBEBUILDER_ASSETS", "")
        missing = [name for name in PROGRAMS if not Path(named, name).is_file()]
        if not named or missing:
            raise NoKubernetesError(f"KUBEBUILDER_ASSETS is {named!r}, where {' and '.join(missing)} are missing")
        self._programs = Path(named)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped = threading.Event()
        self._nodes = threading.Thread(target=self._run_pods, daemon=True)
        self._token = secrets.token_hex(16)
        self._etcd_port, self._peer_port, self._port = _free_ports(3)
        self._tls = ssl.create_default_context()
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE  # it makes its own certificate

    def start(self) -> None:
        """Start all programs; kubectl and its KUBECONFIG are in `folder`/bin."""
        home = self.folder
        (home / "bin").mkdir(parents=True)
        (home / "tokens.csv").write_text(f"{self._token},admin,admin,system:masters\n")
        config = home / "kubeconfig"
        config.write_text(KUBECONFIG.format(port=self._port, token=self._token))
        wrapper = home / "bin" / "kubectl"
        wrapper.write_text(f'#!/bin/sh\nKUBECONFIG="{config}" exec "{self._programs}/kubectl" "$@"\n')
        wrapper.chmod(0o755)
        subprocess.run(["openssl", "genrsa", "-out", str(home / "key"), "2048"], check=True, capture_output=True)
        etcd, peers = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._peer_port))
        clients = [f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peers}"]
        self._run("etcd", f"--data-dir={home}/etcd", *clients)
        self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--cert-dir={home}/certificates",
            f"--service-account-key-file={home}/key",
            f"--service-account-signing-key-file={home}/key",
            "--service-account-issuer=https://localhost",
            f"--token-auth-file={home}/tokens.csv",
            "--authorization-mode=AlwaysAllow",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
        )
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if time.monotonic() > deadline:
                raise NoKubernetesError(f"kube-apiserver does not start: {self._said('kube-apiserver')}")
            time.sleep(0.2)
        self._run(
            "kube-controller-manager",
            f"--kubeconfig={config}",
            "--controllers=job-controller,garbage-collector-controller",
            "--leader-elect=false",
            "--secure-port=0",
            f"--cert-dir={home}/certificates",
        )
        self._nodes.start()

    def stop(self) -> None:
        """Kill all pods and end."""
        self._stopped.set()
        if self._nodes.is_alive():
            self._nodes.join()
        for pod in self.started:
            pod.kill()
            pod.process.wait()
        for process in reversed(self._processes):
            process.terminate()
            process.wait()
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)

    def pods(self) -> list[Pod]:
        """Return the pods that have not ended."""
        return [pod for pod in self.started if pod.exit_code is None]

    def evict(self, pod: Pod) -> None:
        """Evict a pod as a drained node does."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.name, "namespace": "default"}}
        self._ask("POST", f"{NAMESPACE}/pods/{pod.name}/eviction", body)

    def condition(self, name: str) -> tuple[str, str] | None:
        """Return the end of a Job: 'Complete' or 'Failed', and the reason."""
        job = self._ask("GET", f"/apis/batch/v1/namespaces/default/jobs/{name}")
        for found in job.get("status", {}).get("conditions", []):
            if found["type"] in ("Complete", "Failed") and found["status"] == "True":
                return found["type"], found["reason"]
        return None

    def jobs(self) -> list[str]:
        """Names of all Jobs that are there."""
        items = self._ask("GET", "/apis/batch/v1/namespaces/default/jobs")["items"]
        return [item["metadata"]["name"] for item in items]

    def _run(self, program: str, *arguments: str) -> None:
        with open(self.folder / f"{program}.log", "wb") as log:
            self._processes.append(
                subprocess.Popen([str(self._programs / program), *arguments], stdout=log, stderr=log)
            )

    def _said(self, program: str) -> str:
        return (self.folder / f"{program}.log").read_text()[-600:]

    def _is_ready(self) -> bool:
        try:
            return bool(self._ask("GET", NAMESPACE))
        except OSError:
            return False

    def _ask(self, method: str, path: str, body: Object | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        request = urllib.request.Request(f"https://127.0.0.1:{self._port}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, context=self._tls, timeout=30) as answer:
            return json.load(answer)

    def _run_pods(self) -> None:
        """Act as the nodes: start waiting pods, report their states, end deleted ones."""
        known: dict[str, Pod] = {}
        told: dict[str, str] = {}
        while not self._stopped.wait(0.1):
            for item in self._ask("GET", f"{NAMESPACE}/pods")["items"]:
                uid, path = item["metadata"]["uid"], f"{NAMESPACE}/pods/{item['metadata']['name']}"
                is_going = "deletionTimestamp" in item["metadata"]
                if uid not in known and not is_going:
                    target = {"apiVersion": "v1", "kind": "Node", "name": "node0"}
                    binding = {"metadata": {"name": item["metadata"]["name"]}, "target": target}
                    self._ask("POST", f"{path}/binding", {"apiVersion": "v1", "kind": "Binding", **binding})
                    known[uid] = Pod(item, self.folder)
                    self.started.append(known[uid])
                pod = known.get(uid)
                if pod is None:
                    continue
                if is_going:
                    pod.stop()
                pod.look()
                if told.get(uid) != pod.phase:
                    told[uid] = pod.phase
                    self._ask("PATCH", f"{path}/status", {"status": _status(pod)})
                if is_going and pod.exit_code is not None:
                    self._delete(path)

    def _delete(self, path: str) -> None:
        """For good; the Job controller may still hold it until it is counted."""
        try:
            self._ask("DELETE", path, {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0})
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise


def _status(pod: Pod) -> Object:
    container: Object = {"name": pod.spec["containers"][0]["name"], "image": "x", "imageID": "x", "restartCount": 0}
    if pod.exit_code is None:
        container |= {"ready": True, "state": {"running": {}}}
    else:
        container |= {"ready": False, "state": {"terminated": {"exitCode": pod.exit_code}}}
    return {"phase": pod.phase, "containerStatuses": [container]}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports
