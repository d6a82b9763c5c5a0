"""The resources and options of a run's pods on Kubernetes."""

from dataclasses import dataclass
from pathlib import Path

from batchinfer.config import JobConfig
from batchinfer.progress import note
from batchinfer.records import ConfigError
from batchinfer.submit.k8s import names
from batchinfer.submit.submission import check_group, find_template


@dataclass(frozen=True, slots=True)
class Shape:
    """Options of `submit --to k8s`; None for the default of the cluster or the template."""

    image: str
    nodes_per_group: int = 1
    gpus_per_node: int | None = None
    cpus: str | None = None  # per pod
    memory: str | None = None
    namespace: str | None = None
    context: str | None = None  # kubectl's
    queue: str | None = None  # Kueue's LocalQueue
    volumes: tuple[str, ...] = ()  # CLAIM:PATH
    secret: str | None = None  # its keys become environment variables, such as credentials for s3://
    template: str | None = None  # the user's own files instead of batchinfer's
    finish_template: str | None = None

    @property
    def task_template(self) -> str:
        """The template in jobs/ for tasks of one node or of several nodes."""
        return "k8s/tasks.yaml" if self.nodes_per_group == 1 else "k8s/group.yaml"


def check_shape(job: JobConfig, shape: Shape) -> None:
    """Check the options before anything is planned or submitted.

    Raises:
        ConfigError: a name or quantity cannot be used, the run folder is on no volume, or the ranks do not spread over
            the nodes.
    """
    for option in names.FORMS:
        value = getattr(shape, option.removeprefix("--"))
        if value is not None:
            names.check_form(option, value)
    for option, name in (("--queue", shape.queue), ("--secret", shape.secret)):
        if name is not None:
            names.check_name(option, name)
    for template, own in ((shape.task_template, shape.template), ("k8s/finish.yaml", shape.finish_template)):
        find_template(template, own)
    check_group(job.cluster, shape.nodes_per_group, shape.gpus_per_node)
    _check_volumes(job, shape)


def _check_volumes(job: JobConfig, shape: Shape) -> None:
    """Check that all pods can reach the run folder; warn of other folders, of which the image may have a copy."""
    mounts = [Path(names.split_volume(volume)[1]) for volume in shape.volumes]
    if len(set(mounts)) < len(mounts):
        raise ConfigError("--pvc names the same PATH twice; leave one out")
    folder = job.output.dir
    if is_object_store(folder):
        if shape.secret is None:
            note(
                f"warning: the run folder is {folder} and there is no --secret; pods must have credentials of "
                "their own, by the node or a service account"
            )
    elif not _is_below(folder, mounts):
        raise ConfigError(
            f"the run folder {folder} is on a disk, and no --pvc CLAIM:PATH mounts it into the pods; name the claim of "
            "the disk, with a PATH that the run folder is below, or use an s3:// folder"
        )
    for key, path in (("model.path", job.model.path), ("kv.dir", job.kv.dir)):
        if path is not None and not is_object_store(path) and not _is_below(path, mounts):
            note(f"warning: {key} is {path}, which no --pvc mounts; the image must hold it at the same path")


def is_object_store(path: str) -> bool:
    """Return whether `path` is a URI and no path on a disk."""
    return "://" in path


def _is_below(path: str, mounts: list[Path]) -> bool:
    return any(Path(path).is_relative_to(mount) for mount in mounts)
