"""Runs on Kubernetes: the manifests by the API's own schemas, and pods that are killed in a cluster of processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubernetes_validate import validate

from batchinfer.plan import packing
from batchinfer.rundir import RunDir
from batchinfer.submit.k8s.names import LABEL
from batchinfer.submit.submission import run_name
from support import sent_jobs
from support.jobs import batchinfer, output_bytes, write_job, write_questions
from support.kubelet import expanded
from support.kubernetes import JobSet, SimulatedKubernetes
from support.paths import RANDOM_MODEL
from support.real_kubernetes import NoKubernetesError, RealKubernetes
from support.sent_jobs import LONG, computed_here, stumble, submitted

KUBERNETES = "1.34"  # of the schemas
Cluster = SimulatedKubernetes | RealKubernetes
ROWS = (9, 7, 8)


def check_manifest(manifest: dict[str, Any]) -> None:
    """Raises where the API would not take it: no unknown field, none missing, all of their types."""
    if manifest["kind"] == "JobSet":
        model = JobsetV1alpha2JobSet.from_dict(manifest)
        assert model is not None
        assert model.to_dict() == manifest  # what it does not know is lost
        (replicated,) = manifest["spec"]["replicatedJobs"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": manifest["metadata"]["name"]}}
        check_manifest({**job, "spec": replicated["template"]["spec"]})
    else:
        validate(manifest, KUBERNETES, strict=True)
        assert LABEL.fullmatch(manifest["metadata"]["name"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A job of 24 rows in 24 units, and the outputs computed on one machine."""
    return computed_here(tmp_path_factory.mktemp("reference"), ROWS)


@pytest.fixture
def cluster(request, tmp_path, monkeypatch) -> Iterator[Cluster]:
    """A cluster whose kubectl is the first in PATH: simulated, unless a test asks for the real one."""
    found: Cluster
    if getattr(request, "param", "simulated") == "simulated":
        found = SimulatedKubernetes(tmp_path / "cluster", check_manifest)
    else:
        try:
            found = RealKubernetes(tmp_path / "cluster")
        except NoKubernetesError as error:
            pytest.skip(f"NOT TESTED ON A REAL KUBERNETES: {error}")
    monkeypatch.setenv("PATH", f"{found.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.fixture
def submit(reference, tmp_path, monkeypatch, cluster):
    """A function that plans the job into a new folder, whose name a shell or Kubernetes would split, and submits it."""
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 1)
    stumble(monkeypatch, tmp_path / "slow", 0.4)

    def send(*options: str, **settings: Any) -> RunDir:
        here = ["--to", "k8s", "--image", "registry.example/batchinfer:1", "--pvc", f"disk:{tmp_path}"]
        return submitted(reference[0], tmp_path / "a Run; of 100% $(PATH) $$", *here, *options, **settings)

    return send


def wait_for(condition: Callable[[], Any], cluster: Cluster) -> Any:
    return sent_jobs.wait_for(condition, lambda: logs(cluster))


def logs(cluster: Cluster) -> str:
    return "\n".join(f"--- {pod.name}, {pod.exit_code}\n{pod.said}" for pod in cluster.started)


def is_in_the_middle(run: RunDir) -> bool:
    num_done = len(list(run.root.glob("done/*")))
    assert num_done < sum(ROWS) - 4, "too quick to be disturbed"
    return len(list(run.root.glob("units/*/[0-9]*/part-*.parquet"))) > 1


def expect_outputs(run: RunDir, reference: Any, cluster: Cluster) -> None:
    """The outputs of one machine, and every request computed for them exactly once in what counts."""
    finish = next(name for name in cluster.jobs() if name.endswith("-finish"))
    assert wait_for(lambda: cluster.condition(finish), cluster) == ("Complete", "CompletionsReached"), logs(cluster)
    assert output_bytes(run.root) == reference[1]
    requests = pq.read_table(run.stats_file("requests"))
    assert (requests.num_rows, set(requests["status"].to_pylist())) == (sum(ROWS), {"ok"})


BOTH = pytest.mark.parametrize("cluster", ["simulated", pytest.param("real", marks=pytest.mark.slow)], indirect=True)


@pytest.mark.slow
@BOTH
def test_a_run_is_made_smaller_and_larger_cancelled_and_sent_again(submit, reference, cluster):
    run = submit("--array", "3")
    (job,) = [name for name in cluster.jobs() if not name.endswith("-finish")]
    wait_for(lambda: is_in_the_middle(run), cluster)
    assert f"{job}-1 {job}-2" in batchinfer("submit", "--resize", run.root, "1").out
    wait_for(lambda: {pod.task for pod in cluster.pods() if pod.job == job} == {f"{job}-0"}, cluster)
    assert "kubernetes 1 task running" in batchinfer("status", run.root).out
    assert "1 task added" in batchinfer("submit", "--resize", run.root, "2").out
    wait_for(lambda: f"{job}-1" in {pod.task for pod in cluster.pods()}, cluster)
    assert set(batchinfer("cancel", run.root).out.split()[1:]) == {job, f"{job}-finish"}
    wait_for(lambda: not cluster.jobs(), cluster)
    assert "no tasks of" in batchinfer("cancel", run.root).out
    refused = batchinfer("submit", "--resize", run.root, "2")
    assert (refused.code, "no tasks of" in refused.err) == (2, True)
    again = ["--to", "k8s", "--array", "1", "--image", "a/b", "--pvc", f"disk:{run.root.parent}"]
    assert batchinfer("submit", run.root, *again).code == 0
    expect_outputs(run, reference, cluster)


@pytest.mark.slow
def test_a_group_of_two_nodes_starts_anew_when_it_loses_one(submit, reference, cluster, monkeypatch):
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 150)
    run = submit("--array", "1", "--nodes-per-group", "2", prefill_ranks=2)
    (group,) = [made for made in cluster.objects.values() if isinstance(made, JobSet)]
    wait_for(lambda: is_in_the_middle(run), cluster)
    group.pods[1].kill()
    expect_outputs(run, reference, cluster)
    assert (group.restarts, group.counted) == (1, 1)


def dry_run(job: Path, *options: str) -> list[dict[str, Any]]:
    shown = batchinfer("submit", job, "--to", "k8s", "--image", "a/b:1", "--array", "4", "--dry-run", *options)
    assert shown.code == 0, shown.err
    return list(yaml.safe_load_all(shown.out))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("submit")
    write_questions(folder / "prompts", (4,))
    return write_job(folder, cluster={"prefill_ranks": 4})


EVERYTHING = ("--queue", "gpu", "--namespace", "ml", "--secret", "keys", "--cpus", "16", "--memory", "64Gi")


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_dry_run_prints_manifests_that_the_api_takes_and_leaves_no_trace(job, nodes):
    shape = ("--nodes-per-group", str(nodes), "--gpus-per-node", "4", "--pvc", f"disk:{job.parent}", *EVERYTHING)
    found = dry_run(job, *shape)
    for manifest in found:
        check_manifest(manifest)
        assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
        assert manifest["metadata"]["namespace"] == "ml"
    assert [manifest["kind"] for manifest in found] == (["Job"] if nodes == 1 else ["JobSet"] * 4) + ["Job"]
    spec = found[0]["spec"] if nodes == 1 else found[0]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", 4 if nodes == 1 else nodes)
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "4"}
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert pod["volumes"][-1]["persistentVolumeClaim"] == {"claimName": "disk"}
    assert not (job.parent / "run").exists()


def test_a_task_that_was_stopped_does_not_count_as_failed(job):
    tasks, finish = dry_run(job, "--pvc", f"disk:{job.parent}")
    actions = [
        (rule["action"], rule.get("onExitCodes", {}).get("values"))
        for rule in tasks["spec"]["podFailurePolicy"]["rules"]
    ]
    assert actions == [("Ignore", [75]), ("Ignore", None), ("FailIndex", [2])]
    assert finish["spec"]["template"]["spec"]["containers"][0]["args"] == ["finish", "--wait", str(job.parent / "run")]


def test_a_folder_with_dollars_reaches_the_pod_as_it_is(job):
    folder = str(job.parent / "$(PATH) $$ 5$")
    tasks, _ = dry_run(job, "--pvc", f"disk:{job.parent}", "--set", f"output.dir={json.dumps(folder)}")
    (_, argument) = tasks["spec"]["template"]["spec"]["containers"][0]["args"]
    assert expanded(argument, {"PATH": "/bin"}) == folder


@pytest.mark.parametrize(
    "folder",
    ["/data/runs/First", "/data/ÄÖ Ü", "/data/" + "x" * 300, "s3://bucket/a/b/", "/data/--..", "/data/2026-11-23"],
)
def test_names_of_runs_are_labels(folder):
    name = run_name(folder)
    # the longest name that a JobSet makes of it, for a pod
    assert LABEL.fullmatch(f"{name}-12-99999-node-0-15-abcde"), name
    assert name[0].isalpha()
    assert name == run_name(folder)
    assert name != run_name("/elsewhere" + folder)


def test_an_own_template_keeps_what_is_its_own(job, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text((Path(__file__).parents[2] / "jobs" / "k8s" / "tasks.yaml").read_text().replace("120", "300"))
    tasks, _ = dry_run(job, "--pvc", f"disk:{job.parent}", "--template", str(own))
    assert tasks["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 300


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--array", "1"), "is on a disk, and no --pvc"),
        (("--array", "1", "--pvc", "disk:/elsewhere"), "is on a disk, and no --pvc"),
        (("--array", "1", "--pvc", "disk"), "write CLAIM:PATH"),
        (("--array", "1", "--pvc", "Disk:/data"), "names in Kubernetes have"),
        (("--array", "2%1", "--pvc", "disk:HERE"), "write that"),
        (("--array", "1", "--pvc", "disk:HERE", "--queue", "a b"), "names in Kubernetes have"),
        (("--array", "1", "--pvc", "disk:HERE", "--queue", "a" * 64), "63 characters at most"),
        (("--array", "1", "--pvc", "disk:HERE", "--namespace", "a.b"), "no dots"),
        (("--array", "1", "--pvc", "disk:HERE", "--memory", "much"), "write a quantity"),
        (("--array", "1", "--pvc", "disk:HERE", "--memory", "512m"), "with its unit"),
        (("--array", "1", "--pvc", "disk:HERE", "--memory", "64"), "with its unit"),
        (("--array", "1", "--pvc", "disk:HERE", "--cpus", "16Gi"), "write a number of processors"),
        (("--array", "1", "--pvc", "disk:HERE", "--pvc", "disk://"), "write CLAIM:PATH"),
        (("--array", "1", "--pvc", "disk:HERE", "--nodes-per-group", "3"), "4 ranks do not spread evenly over 3 nodes"),
        (("--array", "1", "--pvc", "disk:HERE", "--partition", "main"), "--partition is for --to slurm"),
        (("--array", "1", "--pvc", "disk:HERE", "--template", "none.yaml"), "there is no template"),
        (("--pvc", "disk:HERE"), "needs a JOB and --array"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_planned(job, options, sentence):
    options = [option.replace("HERE", str(job.parent)) for option in options]
    refused = batchinfer("submit", job, "--to", "k8s", "--image", "a/b:1", *options)
    assert refused.code == 2
    assert sentence in refused.err
    assert not (job.parent / "run").exists()


def test_without_an_image_kubectl_or_a_context_a_sentence_says_so(job, monkeypatch, tmp_path):
    here = ["submit", job, "--to", "k8s", "--array", "1", "--pvc", f"disk:{job.parent}"]
    assert "needs --image NAME" in batchinfer(*here).err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cannot run kubectl" in batchinfer(*here, "--image", "a/b").err
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho 'error: current-context is not set' >&2\nexit 1\n")
    kubectl.chmod(0o755)
    assert "kubectl knows no cluster" in batchinfer(*here, "--image", "a/b").err
    assert not (job.parent / "run").exists()


def test_hours_and_cost_by_the_plan(reference, tmp_path):
    write_questions(tmp_path / "prompts", (4,))
    job = write_job(tmp_path, sampling=LONG, pricing={"gpu_hour": 3600.0})
    options = ["--array", "2", "--dry-run"]
    assert "hours and cost are known when there is a plan" in batchinfer("submit", job, *options).err
    assert batchinfer("plan", job, "--learn-from", reference[0].parent / "run").code == 0
    counts = json.loads((tmp_path / "run" / "run.json").read_text())["counts"]
    for to in (["--to", "slurm"], ["--to", "ray"], ["--to", "k8s", "--image", "a/b", "--pvc", f"disk:{tmp_path}"]):
        shown = batchinfer("submit", job, *options, *to)
        assert f"2 tasks of 1 node for {counts['units']} unit" in shown.err
        assert f", {counts['work_s']:,.2f} $ in all" in shown.err


def test_the_models_files_are_told_apart_from_the_runs(job):
    said = batchinfer(
        "submit", job, "--to", "k8s", "--image", "a/b", "--array", "1", "--dry-run", "--pvc", f"d:{job.parent}"
    )
    assert f"model.path is {RANDOM_MODEL}, which no --pvc mounts" in said.err
