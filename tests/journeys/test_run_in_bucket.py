"""A whole run in an object store: the same outputs as on disk, and failures of the store."""

import json
import os

import pyarrow.parquet as pq
import pytest

from batchinfer.api.job import Job
from batchinfer.data import bucket as bucket_module
from support.faults import MIXED, plan_units
from support.faulty_store import Faults, faulty_store
from support.jobs import batchinfer, output_bytes, write_job, write_questions
from support.s3_servers import server_with

pytest.importorskip("obstore")


server = server_with("runs", and_open=True)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A folder with job.toml, and the output files of the job on disk."""
    folder = tmp_path_factory.mktemp("calm")
    write_questions(folder / "prompts")
    job = write_job(folder, sampling=MIXED)
    plan_units(job, folder / "run")
    assert batchinfer("run", job).code == 0
    return folder, output_bytes(folder / "run")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(bucket_module, "REQUEST_S", 1.0)


class InBucket:
    """A job whose run folder is s3://runs/<name>; commands run on nodes with copies of their own."""

    def __init__(self, calm, url, name, scratch):
        self.job, self.uri = calm[0] / "job.toml", f"s3://runs/{name}"
        self._url, self._scratch = url, scratch

    def options(self, node="a", **settings):
        settings = {
            "output.dir": self.uri,
            "output.work_dir": self._scratch / node,
            "s3.endpoint": self._url,
            **settings,
        }
        return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]

    def plan(self, node="a"):
        plan_units(self.job, self.uri, *self.options(node))

    def command(self, name, *more, node="a", code=0, **settings):
        found = batchinfer(name, self.job, *self.options(node, **settings), *more)
        assert found.code == code, found.err
        assert "Traceback" not in found.err
        return found

    def refused(self, name, node="a", code=2, **settings):
        (line,) = [
            line for line in self.command(name, node=node, code=code, **settings).err.splitlines() if "error: " in line
        ]
        return line


def outputs_in(server, name):
    return {key: data for key, data in server.objects("runs", name).items() if key.startswith("outputs/")}


def test_a_run_in_a_bucket_equals_the_run_on_disk(calm, server, tmp_path, monkeypatch):
    """Planned on one node, computed and finished on others, in a store that fails now and then."""
    faults = Faults(share=0.06, kinds=("500", "503", "lost", "late", "stale"), seed=5)
    with faulty_store(server, faults) as url:
        run = InBucket(calm, url, "whole", tmp_path)
        run.plan("planner")
        run.command("work", node="worker")
        assert outputs_in(server, "whole") == {}
        said = run.command("finish", node="finisher").err
        assert f"20 rows in {run.uri}/outputs" in said
        assert faults.injected.total() >= 3
        assert outputs_in(server, "whole") == calm[1]
        num_units = len([key for key in server.objects("runs", "whole") if key.startswith("done/")])
        assert num_units > 2

        faults.share = 0.0
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        check_finished_run(run, calm, tmp_path)


def check_finished_run(run, calm, tmp_path):
    """Check that commands read the run by its URI alone, and that a later plan learns from it."""
    status = json.loads(batchinfer("status", run.uri, "--json").out)
    assert (status["run"], status["state"], status["requests_done"]) == (run.uri, "finished", 20)
    report = json.loads(batchinfer("report", run.uri, "--json").out)
    assert (report["rows"], report["rows_ok"]) == (20, 20)
    assert json.loads(batchinfer("verify", run.uri, "--json").out)["damaged"] == []
    assert len(json.loads(batchinfer("peek", run.uri, "--json").out)) == 10
    assert "is planned already" in run.command("plan", node="other").err
    assert batchinfer("finish", run.uri).code == 0
    job = Job.from_toml(calm[0] / "job.toml")
    output = job.config.output.model_copy(update={"dir": run.uri, "work_dir": str(tmp_path / "python")})
    assert Job.of(job.config.model_copy(update={"output": output})).outputs().num_rows == 20
    planned = [
        planned_after(run.job, earlier, tmp_path / name) for name, earlier in (("a", run.uri), ("b", calm[0] / "run"))
    ]
    assert planned[0].equals(planned[1])


def planned_after(job, earlier, folder):
    """The requests of a plan on disk that has learned from an earlier run."""
    planned = batchinfer(
        "plan", job, "--set", f"output.dir={folder}", "--learn-from", earlier, "--expert-loads", earlier
    )
    assert planned.code == 0, planned.err
    assert "if it starts now" in planned.out
    requests = pq.read_table(folder / "plan" / "requests.parquet")
    assert requests["expected_tokens"].null_count == 0
    return requests


@pytest.mark.all  # make test: wrong places, below
def test_an_earlier_run_that_is_not_in_the_bucket_is_told(calm, server, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    refused = batchinfer("plan", calm[0] / "job.toml", "--set", "output.dir=new", "--learn-from", "s3://runs/nothing")
    assert refused.code == 2
    assert "s3://runs/nothing is not a run folder of batchinfer" in refused.err


def test_a_damaged_job_file_is_named_and_a_plan_puts_it_there_again(calm, server, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = InBucket(calm, server.endpoint, "settings", tmp_path)
    run.plan()
    run.command("work")
    text = server.objects("runs", "settings")["job.toml"].decode()
    server.put("runs", "settings/job.toml", text.replace("max_tokens = ", "max_tokens = 1").encode())
    for command, code in (("verify", 3), ("work", 2), ("finish", 2)):
        ended = batchinfer(command, run.uri)
        assert ended.code == code
        assert "job.toml" in ended.out + ended.err
        assert "it is not what the plan wrote; `batchinfer plan` with the job's own .toml file" in ended.out + ended.err
    assert "is planned already" in run.command("plan", **{"pricing.gpu_hour": 3}).err
    assert "gpu_hour = 3" in server.objects("runs", "settings")["job.toml"].decode()
    assert batchinfer("finish", run.uri).code == 0
    assert json.loads(batchinfer("verify", run.uri, "--json").out)["damaged"] == []


@pytest.mark.slow
def test_a_plan_is_made_again_and_another_job_is_refused(calm, server, tmp_path):
    run = InBucket(calm, server.endpoint, "again", tmp_path)
    run.plan()
    # another user submitted the run; after the cancel nothing is computed, so another job may replace the plan
    server.put("runs", "again/k8s/0000.json", b"{}")
    refused = run.refused("plan", node="b", **{"sampling.max_tokens": 5})
    assert f"`batchinfer cancel {run.uri}`: it was sent to a cluster" in refused
    server.client().delete_object(Bucket="runs", Key="again/k8s/0000.json")
    run.command("plan", node="c", **{"sampling.max_tokens": 5})
    run.command("work", node="c", **{"sampling.max_tokens": 5})
    assert "belongs to another job: sampling.max_tokens was 5 and is now 24" in run.refused("plan", node="a")
    first = server.objects("runs", "again")
    (units,) = [key for key in first if key.startswith("plan/units")]
    server.put("runs", f"again/{units}", b"damaged")
    assert "is damaged" in run.refused("work", node="d", **{"sampling.max_tokens": 5})
    run.command("plan", "--again", node="e", **{"sampling.max_tokens": 5})
    run.command("finish", node="f", **{"sampling.max_tokens": 5})
    assert len(outputs_in(server, "again")) == 3


def test_wrong_places_are_one_sentence(calm, server, tmp_path, monkeypatch):
    run = InBucket(calm, server.endpoint, "wrong", tmp_path)
    for value, told in (
        ("gs://bucket/run", "a run folder is on a file system or in S3"),
        ("s3://runs", "names no folder in a bucket; write s3://bucket/folder"),
        ("s3://runs/*/x", "names no folder in a bucket"),
        ("s3://key:secret@runs/x", "output.dir holds credentials"),
        ("s3://nowhere/run", "there is no bucket nowhere (s3://nowhere/run)"),
    ):
        assert told in run.refused("plan", **{"output.dir": value})
    assert "has no complete plan yet" in run.refused("work")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    for command in ("status", "report", "work"):
        assert "s3://runs/wrong holds no complete plan" in batchinfer(command, run.uri).err
    server.put("runs", "wrong/holiday.jpg", b"x")
    assert "output.dir s3://runs/wrong holds holiday.jpg but no run" in run.refused("plan")
    with faulty_store(server, Faults(conditions="ignored")) as url:
        anyones = {"output.dir": "s3://open/ignored", "s3.anonymous": "true"}
        found = InBucket(calm, url, "ignored", tmp_path).refused("plan", **anyones)
    assert "it ignores If-None-Match" in found
    assert "use one that honours If-None-Match and If-Match" in found
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    bucket_module._connection.cache_clear()
    assert "credentials" in InBucket(calm, server.endpoint, "none", tmp_path).refused("plan")


def test_answers_of_an_earlier_run_in_the_bucket_are_reused(calm, server, tmp_path, monkeypatch):
    """The earlier run has the first of two samples. Plan, work and finish of the new one have a node each."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    two = ("--set", "sampling.n=2")
    assert batchinfer("run", calm[0] / "job.toml", "--set", f"output.dir={tmp_path / 'full'}", *two).code == 0
    earlier = InBucket(calm, server.endpoint, "earlier", tmp_path)
    earlier.plan()
    earlier.command("work")  # and not finished
    run = InBucket(calm, server.endpoint, "reused", tmp_path)
    settings = {"sampling.n": 2}
    plan_units(run.job, run.uri, *run.options("planner", **settings), "--reuse", earlier.uri)
    status = json.loads(batchinfer("status", run.uri, "--json").out)
    assert (status["requests_done"], status["requests"]) == (20, 40)
    run.command("work", node="worker", **settings)
    run.command("finish", node="finisher", **settings)
    assert outputs_in(server, "reused") == output_bytes(tmp_path / "full")
    report = json.loads(batchinfer("report", run.uri, "--json").out)
    assert (report["rows_ok"], report["reused_rows"]) == (40, 20)
    assert json.loads(batchinfer("verify", run.uri, "--json").out)["damaged"] == []
