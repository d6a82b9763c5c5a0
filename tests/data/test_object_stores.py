"""Input from an S3 server and results to it, over HTTP; what goes wrong there; and a file system of fsspec."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json
from batchinfer.config import S3Config
from batchinfer.data.inputs import with_schemas
from batchinfer.data.shard_schemas import id_type
from batchinfer.data.shards import find_shards
from batchinfer.plan.input_columns import check_columns
from batchinfer.records import ConfigError, StoreError
from batchinfer.rundir import RunDir, read_state
from support.checked_rows import make_job
from support.faults import ended
from support.jobs import batchinfer, output_bytes, outputs, start, write_job, write_questions
from support.object_store import KEY_ID, SECRET, free_port, gate
from support.s3_servers import server_with

MIXED = {"max_tokens": 12, "temperature": 0.7, "ignore_eos": True}


server = server_with("data", "results")


@pytest.fixture(scope="module")
def local(tmp_path_factory, server):
    """A finished run over files; the same files are in the bucket `data` below job/."""
    folder = tmp_path_factory.mktemp("local")
    write_questions(folder / "prompts")
    write_job(folder, sampling=MIXED, output={"keep_columns": ["extra"]})
    assert batchinfer("run", folder / "job.toml").code == 0
    server.upload(folder / "prompts", "data", "job")
    return folder


@pytest.fixture(scope="module")
def remote(local, server):
    """The same job over the objects, results published: its folder, and what the command said."""
    job = remote_job(local, server, "remote", "s3://results/remote")
    return local, batchinfer("run", job)


def remote_job(folder, server, name, publish=None, **s3):
    """A job over the objects, with run folder and job file of this name."""
    return write_job(
        folder,
        name=f"{name}.toml",
        sampling=MIXED,
        input={"files": ["s3://data/job/*.parquet"]},
        output={"dir": name, "keep_columns": ["extra"], "publish": publish},
        s3={"endpoint": server.endpoint, **s3},
    )


def parquet_files(run):
    """outputs/ and stats/ of a run folder to the last byte."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for part in ("outputs", "stats")
        for path in (run / part).rglob("*.parquet")
    }


def refused(*arguments, code=2):
    """The one sentence with which a command ends."""
    found = batchinfer(*arguments)
    lines = [line for line in found.err.splitlines() if line.startswith("error: ")]
    assert found.code == code, found.err
    assert len(lines) == 1
    assert "Traceback" not in found.err
    return lines[0]


# ---- whole jobs


def test_a_job_over_objects_equals_the_same_job_over_files(remote, server):
    folder, ended = remote
    assert ended.code == 0, ended.err
    assert output_bytes(folder / "remote") == output_bytes(folder / "run")
    assert outputs(folder / "remote")["part-0.parquet"][3]["extra"] == 3
    shards = json.loads((folder / "remote" / "run.json").read_text())["shards"]
    assert [shard["path"] for shard in shards] == [f"s3://data/job/part-{index}.parquet" for index in range(3)]


def test_results_are_published_whole_with_a_mark_that_lists_them(remote, server):
    folder, _ = remote
    published = server.objects("results", "remote")
    mark = json.loads(published.pop("_SUCCESS"))
    assert set(json.loads(published.pop("_JOB"))) == {"job"}
    assert {name for name in published if name.startswith("outputs/")} == {
        f"outputs/part-{i}.parquet" for i in range(3)
    }
    assert {"stats/run.parquet", "stats/requests.parquet", "stats/units.parquet"} < set(published)
    assert mark["objects"] == {name: len(data) for name, data in published.items()}
    assert (mark["num_rows"], mark["num_errors"], mark["num_missing"]) == (20, 0, 0)
    outputs_there = {name: data for name, data in published.items() if name.startswith("outputs/")}
    assert outputs_there == output_bytes(folder / "remote")


def test_credentials_stay_in_the_environment(remote):
    folder, ended = remote
    files = [path for path in (folder / "remote").rglob("*") if path.is_file()]
    assert len(files) > 10
    for text in (SECRET, KEY_ID):
        assert not [path for path in files if text.encode() in path.read_bytes()]
        assert text not in ended.err + ended.out


@pytest.mark.all  # make test: finish killed, below
def test_finish_again_puts_only_what_is_new_or_gone(remote, server):
    folder, _ = remote
    client = server.client()

    def written(name):
        return client.head_object(Bucket="results", Key=f"remote/outputs/{name}")["LastModified"]

    before = written("part-1.parquet")
    client.delete_object(Bucket="results", Key="remote/outputs/part-0.parquet")
    os.utime(folder / "remote" / "outputs" / "part-2.parquet")  # as if a retry had written it again
    time.sleep(1.1)  # the server tells whole seconds
    assert batchinfer("finish", folder / "remote").code == 0
    assert written("part-0.parquet") > before
    assert written("part-2.parquet") > before
    assert written("part-1.parquet") == before
    published = server.objects("results", "remote")
    assert "_SUCCESS" in published
    assert output_bytes(folder / "remote").items() <= published.items()


@pytest.mark.all  # make test: whole results, above
def test_partial_results_have_another_mark_until_the_run_is_complete(local, server):
    job = remote_job(local, server, "partial", "s3://results/partial")
    assert batchinfer("plan", job).code == 0
    assert set(server.objects("results", "partial")) == {"_JOB"}
    assert batchinfer("finish", job, "--allow-partial").code == 3
    early = server.objects("results", "partial")
    assert "_SUCCESS" not in early
    assert json.loads(early["_PARTIAL"])["num_missing"] == 20
    assert batchinfer("run", job).code == 0
    late = server.objects("results", "partial")
    assert "_PARTIAL" not in late
    assert json.loads(late["_SUCCESS"])["num_missing"] == 0
    assert output_bytes(local / "run").items() <= late.items()


# ---- killed, refused, unreachable


@pytest.mark.parametrize(
    "num_put", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(5, marks=pytest.mark.slow)]
)
def test_finish_killed_while_it_publishes_ends_with_the_same_objects(remote, server, num_put):
    folder, prefix = remote[0], f"killed-{num_put}"
    seen, has_come = [], threading.Event()
    lock = threading.Lock()

    def answer(method, path):
        if method in ("PUT", "POST") and "_JOB" not in path:
            with lock:
                seen.append(path)
                is_late = len(seen) > num_put
            if is_late:
                has_come.set()
                time.sleep(600)  # the one who asks does not live so long

    with gate(server, answer) as url:
        options = ("--set", f"output.publish=s3://results/{prefix}", "--set", f"s3.endpoint={url}")
        process = start("finish", folder / "remote", *options)
        assert has_come.wait(60)
        process.kill()
        assert ended(process).code == -9
    found = server.objects("results", prefix)
    assert "_SUCCESS" not in found
    found.pop("_JOB")
    assert len(found) == num_put
    now = parquet_files(folder / "remote")
    assert all(now[name] == data for name, data in found.items() if name.startswith("outputs/"))

    again = batchinfer("finish", folder / "remote", "--set", f"output.publish=s3://results/{prefix}")
    assert again.code == 0, again.err
    found = server.objects("results", prefix)
    mark = json.loads(found.pop("_SUCCESS"))
    assert set(found) - {"_JOB"} == set(mark["objects"])
    assert output_bytes(folder / "run").items() <= found.items()


PUT_ONE = """
import sys
from pathlib import Path
from batchinfer.config import S3Config
from batchinfer.data.stores import locate
from batchinfer.run.publish import put_file
put_file(Path(sys.argv[1]), locate(sys.argv[2], S3Config(endpoint=sys.argv[3])))
"""


@pytest.mark.all  # make test: whole results, above
def test_a_large_object_that_is_put_in_parts_shows_only_when_it_is_whole(tmp_path, server):
    source, has_come = tmp_path / "large", threading.Event()
    source.write_bytes(os.urandom(1 << 20) * 25)
    parts = []

    def answer(method, path):
        parts.extend([path] if "partNumber" in path else [])
        if method == "POST" and "uploadId" in path:  # all parts are there, to be made one object
            has_come.set()
            time.sleep(600)

    with gate(server, answer) as url:
        command = [sys.executable, "-c", PUT_ONE, str(source), "s3://results/large/object"]
        process = subprocess.Popen([*command, url])
        assert has_come.wait(60)
        process.kill()
        process.wait()
    assert len(parts) > 1
    assert server.objects("results", "large") == {}
    subprocess.run([*command, server.endpoint], check=True)
    assert server.objects("results", "large") == {"object": source.read_bytes()}


@pytest.mark.all  # make test: whole results, above
def test_a_store_that_wants_the_length_of_a_body_first_is_served(tmp_path, server):
    """Ceph's gateway wants the length first."""
    (tmp_path / "small").write_bytes(b"12345")
    with gate(server, lambda method, path: None, takes_chunks=False) as url:
        command = [sys.executable, "-c", PUT_ONE, str(tmp_path / "small"), "s3://results/length/object", url]
        subprocess.run(command, check=True)
    assert server.objects("results", "length") == {"object": b"12345"}


def test_results_that_cannot_be_published_stay_in_the_run_folder(remote, server):
    folder, _ = remote
    before = output_bytes(folder / "remote")
    to = ("--set", "output.publish=s3://results/later")
    server.check_permissions(on=True)
    try:
        sentence = refused("finish", folder / "remote", *to)
    finally:
        server.check_permissions(on=False)
    assert "s3://results/later" in sentence
    assert f"the results are all in {folder / 'remote' / 'outputs'}" in sentence
    assert output_bytes(folder / "remote") == before
    assert batchinfer("finish", folder / "remote", *to).code == 0
    assert before.items() <= server.objects("results", "later").items()


@pytest.mark.all  # make test: bad places, below
def test_a_place_with_results_of_another_job_is_refused(local, remote, server):
    job = remote_job(local, server, "other", "s3://results/remote")
    other = ("--set", "sampling.max_tokens=3")
    assert "belongs to another job" in refused("plan", job, *other)
    server.put("results", "foreign/_SUCCESS", b"")
    assert "something else" in refused("plan", job, "--set", "output.publish=s3://results/foreign")
    assert not (local / "other" / "plan").exists()


BAD = [
    ({"input.files": '["s3://no-such-bucket/a/*.parquet"]'}, "NO_SUCH_BUCKET"),
    ({"input.files": '["s3://no-such-bucket/a.parquet"]'}, "there is no bucket no-such-bucket"),
    ({"input.files": '["s3://data//job/part-0.parquet"]'}, "has two slashes in a row"),
    ({"input.files": '["s3://data/job/none.parquet"]'}, "no file matches s3://data/job/none.parquet"),
    ({"input.files": '["s3://data/job/*.csv"]'}, "no file matches s3://data/job/*.csv"),
    ({"input.files": '["s3://data/notes"]'}, "the folder s3://data/notes/ holds no *.parquet"),
    ({"input.files": '["s3://data/no folder/"]'}, "no file matches s3://data/no folder/"),
    ({"input.files": '["s3://"]'}, "names no bucket"),
    ({"input.files": '["s3://dat*/job"]'}, "names no bucket"),
    ({"input.files": '["nosuch://data/job/a.parquet"]'}, "cannot use nosuch://data/job/a.parquet"),
    ({"input.files": '["s3://AKIA:hush/hush@data/*.parquet"]'}, "holds credentials"),
    ({"input.files": '["http://me:hush@host/a.parquet"]'}, "holds credentials"),
    ({"input.files": '["file://host/a.parquet"]'}, "three slashes"),
    ({"output.publish": "s3://no-such-bucket/results"}, "NO_SUCH_BUCKET"),
    ({"output.publish": "s3://me:hush@results"}, "holds credentials"),
    ({"output.publish": "results"}, "output.dir is the place for a folder"),
    ({"output.dir": "gs://results/run"}, "output.publish"),
    ({"model.path": "s3://data/model"}, "must be a folder"),
    ({"kv.dir": "s3://data/kv"}, "must be a folder"),
    ({"s3.endpoint": "http://me:hush@127.0.0.1"}, "of the form https://host:port"),
    ({"s3.endpoint": "127.0.0.1:9000"}, "of the form https://host:port"),
]


@pytest.mark.parametrize(("changes", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_bad_places_are_one_sentence_before_anything_is_done(local, server, changes, expected):
    server.put("data", "notes/README.md", b"Read me.")
    job = remote_job(local, server, "bad")
    options = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    sentence = refused("plan", job, *options)
    assert expected in sentence
    assert "hush" not in sentence
    assert not (local / "bad" / "plan").exists()


def test_no_network_is_one_sentence(local, server):
    job = remote_job(local, server, "lonely", endpoint=f"http://127.0.0.1:{free_port()}")
    assert "NETWORK_CONNECTION" in refused("plan", job)


# ---- objects that change


@pytest.fixture
def changing(local, server, tmp_path):
    """A separate planned job over one object, and the object's content."""
    data = (local / "prompts" / "part-1.parquet").read_bytes()
    key = f"{tmp_path.name}/a.parquet"
    server.put("data", key, data)
    s3 = {"endpoint": server.endpoint}
    job = write_job(tmp_path, input={"files": [f"s3://data/{key}"]}, s3=s3, output={"keep_columns": ["extra"]})
    assert batchinfer("plan", job).code == 0
    return job, key, data


def same_size_and_footer(data):
    """Another content that neither size nor footer gives away."""
    position = data.index(b"times")
    return data[:position] + b"TIMES" + data[position + 5 :]


def test_an_object_that_is_replaced_is_noticed_by_work_and_by_finish(changing, server):
    job, key, data = changing
    with_other_text = same_size_and_footer(data)
    server.put("data", key, with_other_text)
    assert f"s3://data/{key} changed after it was planned" in refused("work", job)
    assert not list(job.parent.glob("run/units/*/*")), "no unit was claimed"
    server.put("data", key, data)
    assert batchinfer("work", job).code == 0
    server.put("data", key, with_other_text)
    assert "input shards" in refused("plan", job)
    assert f"s3://data/{key} changed after it was planned" in refused("finish", job)
    server.client().delete_object(Bucket="data", Key=key)
    assert f"cannot read s3://data/{key}: it is not there" in refused("finish", job)
    assert not list(job.parent.glob("run/outputs/*"))
    server.put("data", key, data)
    assert batchinfer("finish", job).code == 0


@pytest.mark.all  # make test: a job over objects, above
def test_ranks_work_where_the_store_is_out_of_reach(changing):
    job, key, _ = changing
    away = ("--set", f"s3.endpoint=http://127.0.0.1:{free_port()}")
    found = batchinfer("work", job, *away)
    assert found.code == 0, found.err
    assert f"warning: cannot read s3://data/{key}: NETWORK_CONNECTION" in found.err
    assert "NETWORK_CONNECTION" in refused("finish", job, *away)
    assert batchinfer("finish", job).code == 0


def test_a_damaged_object_is_a_bad_shard_but_a_failing_store_is_not(local, server):
    data = (local / "prompts" / "part-0.parquet").read_bytes()
    server.put("data", "half/a.parquet", data)
    server.put("data", "half/b.parquet", data[:-20])
    where = ("--set", 'input.files=["s3://data/half/*"]', "--set", "output.dir=half")
    job = remote_job(local, server, "half")
    assert "b.parquet cannot be read: its end is missing" in refused("plan", job, *where, "--strict")
    num_reads = 0

    def answer(method, path):
        nonlocal num_reads
        num_reads += method == "GET" and "a.parquet" in path
        return 503 if num_reads > 5 else None  # listed and inspected, but then not to be read

    with gate(server, answer) as url:
        sentence = refused("plan", job, *where, "--set", f"s3.endpoint={url}")
    assert "cannot read s3://data/half/a.parquet" in sentence
    assert num_reads > 6, "the request was tried again"
    found = batchinfer("plan", job, *where)
    assert found.code == 0
    assert "b.parquet cannot be read" in found.err
    problems = [shard["problem"] for shard in json.loads((local / "half" / "run.json").read_text())["shards"]]
    assert [problem is None for problem in problems] == [True, False]


# ---- names


def test_globs_over_objects_match_like_globs_over_files(tmp_path, server):
    names = [
        "a.parquet",
        "b c.parquet",
        "d/e+%20#.parquet",
        "d/f/ü.parquet",
        "d/.hidden.parquet",
        "g1.parquet",
        "g2.csv",
    ]
    for name in names:
        (tmp_path / "top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / name).write_bytes(b"x")
    server.upload(tmp_path / "top", "data", "names")
    s3 = S3Config(endpoint=server.endpoint)
    for pattern in ("*", "*.parquet", "**", "**/*.parquet", "d/**", "*/e*", "g?.*", "[ab]*", "d/f/ü.parquet", "**/f/*"):
        files = [shard.path.removeprefix(f"{tmp_path}/top/") for shard in find_shards([f"{tmp_path}/top/{pattern}"])]
        objects = [
            shard.path.removeprefix("s3://data/names/") for shard in find_shards([f"s3://data/names/{pattern}"], s3=s3)
        ]
        assert objects == files
        assert objects


@pytest.mark.parametrize("folder", ["s3://data/hub", "s3://data/hub/", "s3://data/h?b", "s3://data/h?b/"])
def test_a_folder_of_objects_stands_for_its_data_files(local, server, folder):
    shard = (local / "prompts" / "part-1.parquet").read_bytes()
    listed = json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}).encode()
    for name, data in {
        "lang=pt%2DBR/a.parquet": shard,
        "lang=de/b.jsonl": b'{"id": "x", "prompt": "Hello"}\n',
        "README.md": b"Read me.",
        ".cache/c.parquet": shard,
        "_tmp/d/e.parquet": shard,
        "saved/state.json": listed,
        "saved/data-0.arrow": b"damaged",
        "saved/cache-1.arrow": b"damaged",
    }.items():
        server.put("data", f"hub/{name}", data)
    shards = find_shards([folder], s3=S3Config(endpoint=server.endpoint))
    names = ["lang=de/b.jsonl", "lang=pt%2DBR/a.parquet", "saved/data-0.arrow"]
    assert [shard.path for shard in shards] == [f"s3://data/hub/{name}" for name in names]
    assert [shard.num_rows for shard in shards] == [1, 4, 0]


def test_folders_beside_objects_are_named_and_nobody_looks_into_them(server, monkeypatch, capsys):
    for name in ("a.jsonl", "archive/b.jsonl", "c/d.jsonl"):
        server.put("data", f"beside/{name}", b'{"id": "x", "prompt": "Hello"}\n')
    monkeypatch.delattr("batchinfer.data.folders.objects_below")
    shards = find_shards(["s3://data/beside/*", "s3://data/beside/c/d.jsonl"], s3=S3Config(endpoint=server.endpoint))
    assert [shard.path for shard in shards] == ["s3://data/beside/a.jsonl", "s3://data/beside/c/d.jsonl"]
    assert capsys.readouterr().err.endswith(
        "which are not read; name the folders to read them too: s3://data/beside/archive/\n"
    )


def test_an_object_with_brackets_in_its_name_is_found_as_it_stands(server):
    for name in ("part[1].jsonl", "part1.jsonl"):
        server.put("data", f"brackets/{name}", b'{"id": "x", "prompt": "Hello"}\n')
    s3 = S3Config(endpoint=server.endpoint)
    assert [shard.path for shard in find_shards(["s3://data/brackets/part[1].jsonl"], s3=s3)] == [
        "s3://data/brackets/part[1].jsonl"
    ]


@pytest.mark.all  # make test: bad places, above
def test_objects_whose_names_no_output_file_can_have_are_refused(server):
    s3 = S3Config(endpoint=server.endpoint)
    server.put("data", "odd/x//y.parquet", b"")
    with pytest.raises(ConfigError, match="cannot be that of a file"):
        find_shards(["s3://data/odd/**"], s3=s3)
    row = b'{"id": "x", "prompt": "Hello"}\n'
    server.put("data", "twice/z.jsonl", row)
    server.put("data", "twice//z.jsonl", row)  # is not the object above
    for pattern in ("s3://data/twice/", "s3://data/twice/**"):
        with pytest.raises(ConfigError, match=r"twice//z\.jsonl cannot be that of a file"):
            find_shards([pattern], s3=s3)
    server.put("data", "up/../../y.parquet", b"")  # names of dots count as hidden
    with pytest.raises(ConfigError, match="no file matches"):
        find_shards(["s3://data/up/**"], s3=s3)


@pytest.mark.all  # make test: tests/data/test_bucket.py
def test_endpoint_and_region_come_from_the_environment_too(local, server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    assert len(find_shards(["s3://data/job/*.parquet"])) == 3


@pytest.mark.all  # make test: tests/data/test_bucket.py
def test_public_objects_need_no_credentials(local, server):
    data = (local / "prompts" / "part-0.parquet").read_bytes()
    server.client().put_object(Bucket="data", Key="public/a.parquet", Body=data, ACL="public-read")
    anonymous = S3Config(endpoint=server.endpoint, anonymous=True)
    assert find_shards(["s3://data/public/a.parquet"], s3=anonymous)[0].num_rows == 9
    with pytest.raises(StoreError, match="ACCESS_DENIED"):
        find_shards(["s3://data/job/part-0.parquet"], s3=anonymous)


# ---- fsspec


def test_a_file_system_of_fsspec_serves_other_schemes(local, tmp_path):
    with zipfile.ZipFile(tmp_path / "prompts.zip", "w") as archive:
        for path in sorted((local / "prompts").iterdir()):
            archive.write(path, path.name)
    (tmp_path / "results").mkdir()
    job = write_job(
        tmp_path,
        sampling=MIXED,
        input={"files": [f"zip://*.parquet::{tmp_path}/prompts.zip"]},
        output={"keep_columns": ["extra"], "publish": f"dir://here::file://{tmp_path}/results"},
    )
    found = batchinfer("run", job)
    assert found.code == 0, found.err
    assert output_bytes(tmp_path / "run") == output_bytes(local / "run")
    there = tmp_path / "results" / "here"
    assert output_bytes(there) == output_bytes(local / "run")
    assert json.loads((there / "_SUCCESS").read_text())["num_rows"] == 20
    assert not list(there.rglob("*.tmp"))
    assert pq.read_table(there / "stats" / "requests.parquet").num_rows == 20


# ---- requests


def test_a_run_folder_of_an_earlier_version_without_schemas_is_finished(local):
    run = RunDir(shutil.copytree(local / "run", local / "earlier"))
    state = read_state(run)
    del state["schemas"], state["finished"]
    for shard in state["shards"]:
        shard["schema"] = ""
    publish_json(run.run_json, {**state, "state": "planned"})
    shutil.rmtree(run.outputs)
    finished = batchinfer("finish", run.root)
    assert finished.code == 0, finished.err
    assert output_bytes(run.root) == output_bytes(local / "run")


def test_columns_are_known_without_another_request(local, server):
    """Listing asks for each object's size, first and last bytes and footer; the schemas come from these footers."""
    requests = []
    with gate(server, lambda method, path: requests.append(method)) as url:
        s3 = S3Config(endpoint=url)
        shards = find_shards(["s3://data/job/*.parquet"], s3=s3)
        assert len(requests) <= 1 + 4 * len(shards)
        requests.clear()
        job = make_job("s3://data/job/*.parquet", keep=["extra"])
        assert check_columns(job, shards, ["prompt"]) == [pa.field("extra", pa.int64())]
        assert id_type(shards, "id") == pa.string()
        assert with_schemas(shards, s3) == shards
        assert requests == []
        without = [replace(shard, schema="") for shard in shards]  # as earlier versions wrote them to run.json
        assert with_schemas(without, s3) == shards
        assert requests.count("HEAD") == len(shards)
