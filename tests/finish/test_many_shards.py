"""Outputs of many small shards come from one query, each in its own file."""

from __future__ import annotations

import json

import pytest

from batchinfer.finish import finish
from batchinfer.finish import outputs as outputs_module
from support.jobs import batchinfer, outputs, question, write_job, write_shard
from support.tiers import first_in_make_test

COUNTS = (2, 0, 3, 1, 0, 4)  # rows of each shard
BAD = 3  # the shard whose first row is bad


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    for shard, count in enumerate(COUNTS):
        prompts = [question(10 * shard + row) for row in range(count)]
        columns = {"id": [f"{shard}-{row}" for row in range(count)], "prompt": prompts, "extra": [shard] * count}
        if shard == BAD:
            columns["prompt"][0] = ""
        write_shard(folder / "prompts" / f"part-{shard}.parquet", columns)
    (folder / "prompts" / "part-9.parquet").write_text("no table")
    job = write_job(folder, output={"keep_columns": ["extra"]}, sampling={"max_tokens": 2, "n": 2})
    assert batchinfer("plan", job).code == 0
    assert batchinfer("work", job).code == 0
    return job


@pytest.mark.parametrize("form", first_in_make_test(["parquet", "jsonl", "openai"]))
def test_each_small_shard_has_its_rows_in_order(job, monkeypatch, form):
    asked = []
    plain = outputs_module.output_rows
    monkeypatch.setattr(outputs_module, "output_rows", lambda run, shards: asked.append(shards) or plain(run, shards))
    run = job.parent / "run"
    assert batchinfer("finish", job, "--set", f"output.format={form}").code == 3
    assert len(asked) == 1
    found = outputs(run)
    assert list(found) == [f"part-{shard}.parquet" for shard in range(len(COUNTS))]
    for shard, count in enumerate(COUNTS):
        rows = found[f"part-{shard}.parquet"]
        expected = [(f"{shard}-{row}", row, sample, shard) for row in range(count) for sample in range(2)]
        assert [(row["id"], row["row"], row["sample"], row["extra"]) for row in rows] == expected
        assert [row["status"] for row in rows] == ["error" if shard == BAD else "ok"] * 2 * count
        if form == "parquet":
            continue
        lines = (run / "outputs" / f"part-{shard}.jsonl").read_text().splitlines()
        key = "custom_id" if form == "openai" else "id"
        ids = [row["id"] for row in rows if form == "jsonl" or (shard != BAD and row["sample"] == 0)]
        assert [json.loads(line)[key] for line in lines] == ids


@pytest.mark.parametrize("name", ["in.parquet", "in.jsonl"])
def test_a_shard_that_is_replaced_while_outputs_are_written_is_refused(tmp_path, monkeypatch, name):
    """Its kept columns may be in the outputs already."""
    first, second = ([{"prompt": question(row), "extra": extra} for row in range(3)] for extra in ("then", "now!"))

    def write(rows):
        if name.endswith(".jsonl"):
            (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        else:
            write_shard(tmp_path / name, {key: [row[key] for row in rows] for key in rows[0]})

    def replace_and_write(*arguments):
        write(second)
        return plain(*arguments)

    write(first)
    job = write_job(tmp_path, input={"files": [name]}, output={"keep_columns": ["extra"]}, sampling={"max_tokens": 2})
    assert batchinfer("plan", job).code == 0
    assert batchinfer("work", job).code == 0
    plain = finish.write_outputs
    with monkeypatch.context() as patch:
        patch.setattr(finish, "write_outputs", replace_and_write)
        ended = batchinfer("finish", job)
    assert ended.code == 2
    assert f"{name} changed after it was planned" in ended.err
    write(first)
    assert batchinfer("finish", job).code == 0
    assert [row["extra"] for row in outputs(tmp_path / "run")["in.parquet"]] == ["then"] * 3
