"""The objects that Kubernetes gets: templates of jobs/k8s, with what is different for each run put in as data.

A template is parsed, changed as a tree and written again, so that no path or name can turn into YAML of its own.
"""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

from batchinfer.records import ConfigError
from batchinfer.submit.k8s.names import split_volume
from batchinfer.submit.k8s.shape import Shape, is_object_store
from batchinfer.submit.template import find_template

Manifest = dict[str, Any]

CONTAINER = "batchinfer"  # that templates must have
RUN_LABEL, PART_LABEL = "app.kubernetes.io/instance", "app.kubernetes.io/component"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GPU = "nvidia.com/gpu"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_FAILURES = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
_IGNORED = "metadata.annotations['batch.kubernetes.io/job-index-ignored-failure-count']"
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def task_job(run: str, name: str, run_label: str, shape: Shape, tasks: int) -> Manifest:
    """An Indexed Job of tasks of one node each.

    Args:
        run: folder or URI.
        name: of the Job.
        run_label: names the run.
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
    """A JobSet: one task of several nodes. Arguments are those of `task_job`."""
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
        _value("BATCHINFER_GROUP", f"{name}-$(BATCHINFER_RESTARTS)"),  # a new life meets anew
        _from_field("BATCHINFER_GROUP_INDEX", _INDEX),
        _value("BATCHINFER_GROUP_SIZE", str(shape.nodes_per_group)),
    ]
    labels = {**manifest["metadata"]["labels"]}
    labels.pop(QUEUE_LABEL, None)  # the JobSet is what waits in the queue
    spec["template"].setdefault("metadata", {}).setdefault("labels", {}).update(labels)
    _fill_pod(spec["template"], shape, ["work", _literal(run)], environment, run)
    _put_resources(spec["template"], shape)
    return manifest


def finish_job(run: str, name: str, run_label: str, shape: Shape) -> Manifest:
    """The Job that waits for the tasks' results and writes the outputs. Arguments are those of `task_job`."""
    manifest = _load("k8s/finish.yaml", shape.finish_template, "Job")
    _put_names(manifest, run, name, run_label, "finish", shape)
    _fill_pod(
        manifest["spec"]["template"], shape, ["finish", "--wait", _literal(run)], [_value("BATCHINFER_TASK", name)], run
    )
    return manifest


def as_yaml(manifests: list[Manifest]) -> str:
    """The objects as one stream that `kubectl create -f -` takes."""
    import yaml  # only here and in _load: `status` needs none

    return yaml.safe_dump_all(manifests, sort_keys=False, width=120, explicit_start=True)


def _load(name: str, own: str | None, kind: str) -> Manifest:
    """A template's tree.

    Raises:
        ConfigError: it is missing, no YAML, of another kind, or has no container of ours.
    """
    import yaml

    path = find_template(name, None if own is None else Path(own))
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or found.get("kind") != kind or not isinstance(found.get("spec"), dict):
        raise ConfigError(f"{path} is no template here: it must hold one {kind}; begin with a copy of jobs/{name}")
    # names first: the rest of a template may be long
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
    """Image, command, variables and volumes."""
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
        # files of the run folder belong to whoever has planned it
        owner = {"runAsUser": os.getuid(), "runAsGroup": os.getgid()}
        pod["securityContext"] = {**owner, **pod.get("securityContext", {})}


def _put_resources(template: Manifest, shape: Shape) -> None:
    """What a node of a task asks for. Kubernetes takes GPUs as a limit, which is the request, too."""
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
    """For arguments: Kubernetes reads $(NAME) in them, and $$ as a plain $."""
    return text.replace("$", "$$")


def _value(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _from_field(name: str, field: str) -> Manifest:
    """A variable that the node sets from what it knows of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}
