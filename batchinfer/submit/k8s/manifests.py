"""Manifests of a run's Kubernetes objects: the templates of jobs/k8s, filled in for each run.

A template is parsed, changed as a tree and written again, so that no path or name is parsed as YAML.
"""

import os
from copy import deepcopy
from typing import Any

from batchinfer.records import ConfigError
from batchinfer.submit.k8s.names import split_volume
from batchinfer.submit.k8s.shape import Shape, is_object_store
from batchinfer.submit.submission import find_template

Manifest = dict[str, Any]

CONTAINER = "batchinfer"  # every template has a container of this name
RUN_LABEL, PART_LABEL = "app.kubernetes.io/instance", "app.kubernetes.io/component"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GPU = "nvidia.com/gpu"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_FAILURES = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
_IGNORED = "metadata.annotations['batch.kubernetes.io/job-index-ignored-failure-count']"
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def task_job(run: str, name: str, run_label: str, shape: Shape, tasks: int) -> Manifest:
    """Return the Indexed Job of tasks of one node each.

    Args:
        run: the run's folder or URI.
        name: the Job's name.
        run_label: value of the label that names the run.
    """
    manifest = _load(shape.task_template, shape.template, "Job")
    _put_names(manifest, run, name, run_label, "tasks", shape)
    manifest["spec"] |= {"completions": tasks, "parallelism": tasks}
    environment = [
        _from_field("BATCHINFER_INDEX", _INDEX),
        _value("BATCHINFER_TASK", f"{name}-$(BATCHINFER_INDEX)"),
        _from_field("BATCHINFER_RESTARTS", _FAILURES),
        _from_field("BATCHINFER_RESUMES", _IGNORED),
    ]
    _fill_pod(manifest["spec"]["template"], shape, ["work", _literal(run)], environment, run)
    _put_resources(manifest["spec"]["template"], shape)
    return manifest


def task_group(run: str, name: str, run_label: str, shape: Shape) -> Manifest:
    """Return the JobSet of one task of several nodes. Arguments are those of `task_job`."""
    manifest = _load(shape.task_template, shape.template, "JobSet")
    _put_names(manifest, run, name, run_label, "tasks", shape)
    jobs = manifest["spec"].get("replicatedJobs") or []
    if len(jobs) != 1:
        raise ConfigError("a template of a group needs one entry in spec.replicatedJobs, whose pods are the nodes")
    spec = jobs[0]["template"]["spec"]
    spec |= {"completions": shape.nodes_per_group, "parallelism": shape.nodes_per_group}
    environment = [
        _value("BATCHINFER_TASK", name),
        _from_field("BATCHINFER_RESTARTS", _RESTARTS),
        _value("BATCHINFER_GROUP", f"{name}-$(BATCHINFER_RESTARTS)"),  # a new name per restart
        _from_field("BATCHINFER_GROUP_INDEX", _INDEX),
        _value("BATCHINFER_GROUP_SIZE", str(shape.nodes_per_group)),
    ]
    labels = {**manifest["metadata"]["labels"]}
    labels.pop(QUEUE_LABEL, None)  # the JobSet waits in the queue, not its pods
    spec["template"].setdefault("metadata", {}).setdefault("labels", {}).update(labels)
    _fill_pod(spec["template"], shape, ["work", _literal(run)], environment, run)
    _put_resources(spec["template"], shape)
    return manifest


def finish_job(run: str, name: str, run_label: str, shape: Shape) -> Manifest:
    """Return the Job that waits for the tasks' results and writes the outputs. Arguments are those of `task_job`."""
    manifest = _load("k8s/finish.yaml", shape.finish_template, "Job")
    _put_names(manifest, run, name, run_label, "finish", shape)
    _fill_pod(
        manifest["spec"]["template"], shape, ["finish", "--wait", _literal(run)], [_value("BATCHINFER_TASK", name)], run
    )
    return manifest


def as_yaml(manifests: list[Manifest]) -> str:
    """Return the objects as one YAML stream for `kubectl create -f -`."""
    import yaml  # imported late: `status` needs no YAML

    return yaml.safe_dump_all(manifests, sort_keys=False, width=120, explicit_start=True)


def _load(name: str, own: str | None, kind: str) -> Manifest:
    """Load a template as a tree.

    Raises:
        ConfigError: the template is missing, no YAML, or of another kind.
    """
    import yaml

    path = find_template(name, own)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or found.get("kind") != kind or not isinstance(found.get("spec"), dict):
        raise ConfigError(f"{path} is no usable template: it must hold one {kind}; begin with a copy of jobs/{name}")
    # metadata comes first in the written manifest
    return {"apiVersion": found.get("apiVersion"), "kind": kind, "metadata": {}, **found}


def _put_names(manifest: Manifest, run: str, name: str, run_label: str, part: str, shape: Shape) -> None:
    metadata = manifest["metadata"]
    metadata["name"] = name
    if shape.namespace is not None:
        metadata["namespace"] = shape.namespace
    labels = {"app.kubernetes.io/name": "batchinfer", RUN_LABEL: run_label, PART_LABEL: part}
    metadata.setdefault("labels", {}).update(labels)
    metadata.setdefault("annotations", {})["batchinfer/run"] = run
    if manifest["kind"] == "Job":
        template = manifest["spec"].setdefault("template", {})
        template.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
    if shape.queue is not None:
        metadata["labels"][QUEUE_LABEL] = shape.queue


def _fill_pod(template: Manifest, shape: Shape, arguments: list[str], environment: list[Manifest], run: str) -> None:
    """Set image, command, variables and volumes of the pod's container."""
    pod, container = template["spec"], _container(template)
    container.setdefault("command", ["batchinfer"])
    container |= {"image": shape.image, "args": arguments}
    own = [
        _value("BATCHINFER_LAUNCHER", "Kubernetes"),
        _from_field("BATCHINFER_NODE", "spec.nodeName"),
        *environment,
    ]
    container["env"] = [*container.get("env", []), *deepcopy(own)]
    if shape.secret is not None:
        container["envFrom"] = [*container.get("envFrom", []), {"secretRef": {"name": shape.secret}}]
    for number, volume in enumerate(shape.volumes):
        claim, path = split_volume(volume)
        pod.setdefault("volumes", []).append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        container.setdefault("volumeMounts", []).append({"name": f"claim-{number}", "mountPath": path})
    if not is_object_store(run):
        # pods run as the user who owns the files of the run folder
        owner = {"runAsUser": os.getuid(), "runAsGroup": os.getgid()}
        pod["securityContext"] = {**owner, **pod.get("securityContext", {})}


def _put_resources(template: Manifest, shape: Shape) -> None:
    """Set the resource requests and limits of a node; Kubernetes takes GPUs as a limit, which is also the request."""
    asked = {"cpu": shape.cpus, "memory": shape.memory}
    requests = {name: value for name, value in asked.items() if value is not None}
    limits = {} if shape.memory is None else {"memory": shape.memory}
    if shape.gpus_per_node is not None:
        limits[GPU] = str(shape.gpus_per_node)
    resources = _container(template).setdefault("resources", {})
    for part, values in (("requests", requests), ("limits", limits)):
        if values:
            resources[part] = {**resources.get(part, {}), **values}
    if not resources:
        del _container(template)["resources"]


def _container(template: Manifest) -> Manifest:
    for container in template.get("spec", {}).get("containers") or []:
        if container.get("name") == CONTAINER:
            found: Manifest = container
            return found
    raise ConfigError(f"a template's pod has no container {CONTAINER!r}; begin with a copy of those in jobs/k8s")


def _literal(text: str) -> str:
    """Escape an argument: Kubernetes expands $(NAME) in arguments, and reads $$ as a plain $."""
    return text.replace("$", "$$")


def _value(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _from_field(name: str, field: str) -> Manifest:
    """Return an environment variable that Kubernetes sets from a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}
