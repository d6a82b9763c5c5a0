"""Whole jobs through the command: every row comes out once, in order, whatever is wrong with it."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.jobs import batchinfer, output_bytes, outputs, question, write_job, write_questions, write_shard


@pytest.fixture
def questions(tmp_path):
    write_questions(tmp_path / "prompts")
    return tmp_path


def test_outputs_mirror_the_input_shards_row_by_row(questions):
    job = write_job(questions, output={"keep_columns": ["extra"]})
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    rows = outputs(questions / "run")
    assert list(rows) == ["part-0.parquet", "part-1.parquet", "part-2.parquet"]
    assert [row["id"] for shard in rows.values() for row in shard] == [f"q{i}" for i in range(20)]
    assert [row["row"] for row in rows["part-2.parquet"]] == list(range(7))
    assert [row["extra"] for shard in rows.values() for row in shard] == list(range(20))
    for row in (row for shard in rows.values() for row in shard):
        assert (row["status"], row["error"], row["sample"]) == ("ok", None, 0)
        assert row["completion_tokens"] == len(row["token_ids"]) <= 8
        assert 0 <= row["cached_tokens"] < row["prompt_tokens"]
        assert row["finish_reason"] in ("stop", "length")


def test_every_kind_of_bad_prompt_is_an_error_row_in_its_place(tmp_path):
    prompts = [question(0), None, "", "far too long " * 2000, question(1)]
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": [1, 2, 2, 3, None], "prompt": prompts})
    write_shard(tmp_path / "prompts" / "b.parquet", {"id": [7, 8], "prompt": [1.5, 2.5]})
    write_shard(tmp_path / "prompts" / "c.parquet", {"id": [9], "text": ["no prompt column"]})
    ended = batchinfer("run", write_job(tmp_path))
    assert ended.code == 3, ended.err
    rows = outputs(tmp_path / "run")
    assert [row["status"] for row in rows["a.parquet"]] == ["ok", "error", "error", "error", "ok"]
    assert [row["id"] for row in rows["a.parquet"]] == [1, 2, 2, 3, None]
    for row in [*rows["a.parquet"][1:4], *rows["b.parquet"], *rows["c.parquet"]]:
        assert row["error"]
        assert (row["text"], row["token_ids"], row["finish_reason"]) == (None, None, "error")
        assert row["prompt_tokens"] == row["cached_tokens"] == row["completion_tokens"] == 0
    assert "window" in rows["a.parquet"][3]["error"]
    assert "prompt" in rows["b.parquet"][0]["error"]
    metrics = json.loads(batchinfer("report", tmp_path / "run", "--json").out)
    assert (metrics["rows"], metrics["rows_ok"], metrics["rows_error"]) == (8, 2, 6)


def test_messages_go_through_the_chat_template_and_bad_ones_do_not_stop_the_others(tmp_path):
    good = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    messages = pa.array([good, None, [], [{"role": None, "content": "x"}], good], kind)
    write_shard(tmp_path / "prompts" / "a.parquet", {"messages": messages})
    ended = batchinfer("run", write_job(tmp_path, input={"prompt": None, "messages": "messages"}))
    assert ended.code == 3, ended.err
    rows = outputs(tmp_path / "run")["a.parquet"]
    assert [row["status"] for row in rows] == ["ok", "error", "error", "error", "ok"]
    assert rows[0]["text"] == rows[4]["text"]


def test_an_unreadable_shard_is_named_and_the_others_still_run(questions):
    whole = (questions / "prompts" / "part-1.parquet").read_bytes()
    (questions / "prompts" / "part-1.parquet").write_bytes(whole[: len(whole) // 2])
    job = write_job(questions)
    ended = batchinfer("run", job)
    assert ended.code == 3
    assert "part-1.parquet" in ended.err
    assert list(outputs(questions / "run")) == ["part-0.parquet", "part-2.parquet"]
    shards = json.loads((questions / "run" / "run.json").read_text())["shards"]
    assert [bool(shard["problem"]) for shard in shards] == [False, True, False]

    strict = batchinfer("run", job, "--strict", "--set", "output.dir=strict")
    assert strict.code == 2
    assert "part-1.parquet" in strict.err
    assert not (questions / "strict" / "outputs").exists()


def test_a_job_without_any_readable_shard_ends_with_2(tmp_path):
    (path,) = write_questions(tmp_path / "prompts", (9,))
    data = bytearray(path.read_bytes())
    place = pq.read_metadata(path).row_group(1).column(1).data_page_offset + 20
    data[place : place + 40] = b"\xff" * 40
    path.write_bytes(bytes(data))  # damaged in the middle
    assert "the only input shard cannot be read: " in batchinfer("run", write_job(tmp_path)).err
    path.write_bytes(bytes(data[:100]))  # cut off
    ended = batchinfer("run", write_job(tmp_path, output={"dir": "other"}))
    assert ended.code == 2
    assert "part-0.parquet" in ended.err


def test_a_kept_column_of_a_damaged_shard_alone_is_null_in_the_outputs(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": [""]})
    path = write_shard(tmp_path / "prompts" / "b.parquet", {"prompt": [question(0)], "task": ["sum"]})
    data = bytearray(path.read_bytes())
    place = pq.read_metadata(path).row_group(0).column(0).data_page_offset + 20
    data[place : place + 40] = b"\xff" * 40
    path.write_bytes(bytes(data))
    ended = batchinfer("run", write_job(tmp_path, output={"keep_columns": ["task"]}))
    assert ended.code == 3, ended.err
    assert [row["task"] for row in outputs(tmp_path / "run")["a.parquet"]] == [None]


def test_a_job_whose_rows_are_all_bad_loads_no_model(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["", ""]})
    write_shard(tmp_path / "prompts" / "b.parquet", {"prompt": pa.array([], pa.string())})
    ended = batchinfer("run", write_job(tmp_path))
    assert ended.code == 3, ended.err
    rows = outputs(tmp_path / "run")
    assert [row["status"] for row in rows["a.parquet"]] == ["error", "error"]
    assert rows["b.parquet"] == []
    assert json.loads(batchinfer("report", tmp_path / "run", "--json").out)["gpu_hours"] == 0


def test_strict_stops_at_a_bad_row_before_the_model_loads(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": [question(0), None]})
    job = write_job(tmp_path)
    ended = batchinfer("run", job, "--strict")
    assert ended.code == 2
    assert "row 1" in ended.err
    assert batchinfer("run", job).code == 3  # the same folder goes on without --strict
    for command in ("work", "finish"):
        assert "1 bad row" in batchinfer(command, tmp_path / "run", "--strict").err


def test_samples_and_duplicates(tmp_path):
    prompts = [question(0), question(1), question(0)]
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": ["x", "y", "x"], "prompt": prompts})
    greedy = write_job(tmp_path, sampling={"n": 2}, output={"dir": "greedy"})
    assert batchinfer("run", greedy).code == 0
    rows = outputs(tmp_path / "greedy")["a.parquet"]
    assert [(row["row"], row["sample"]) for row in rows] == [(i, s) for i in range(3) for s in range(2)]
    # one prompt is computed for four rows; what the three others get is counted as a duplicate
    assert rows[0]["token_ids"] == rows[1]["token_ids"] == rows[4]["token_ids"] == rows[5]["token_ids"]
    assert [row["cached_tokens"] == row["prompt_tokens"] for row in rows] == [False, True, False, True, True, True]
    metrics = json.loads(batchinfer("report", tmp_path / "greedy", "--json").out)
    assert metrics["output_tokens"] == sum(row["completion_tokens"] for row in rows)
    assert metrics["cached_tokens"] <= metrics["optimal_cached_tokens"]

    drawn = write_job(tmp_path, sampling={"n": 2, "temperature": 1.0}, output={"dir": "drawn"})
    assert batchinfer("run", drawn).code == 0
    rows = outputs(tmp_path / "drawn")["a.parquet"]
    # a repeated id, and each sample, gets different draws
    assert len({tuple(row["token_ids"]) for row in rows if row["row"] != 1}) == 4


def test_page_budget_prefill_size_and_batch_size_change_no_byte_of_the_outputs(questions):
    reference = write_job(questions, output={"dir": "reference"})
    assert batchinfer("run", reference).code == 0
    for name, cluster in {
        "pages": {"page_bytes": 600_000},
        "prefill": {"prefill_tokens": 33},
        "decode": {"decode_requests": 2},
    }.items():
        job = write_job(questions, cluster=cluster, output={"dir": name})
        ended = batchinfer("run", job)
        assert ended.code == 0, ended.err
        assert output_bytes(questions / name) == output_bytes(questions / "reference")


def test_a_page_budget_below_the_largest_row_is_refused_while_planning(questions):
    ended = batchinfer("plan", write_job(questions, cluster={"page_bytes": 1000}))
    assert ended.code == 2
    needed = int(re.search(r"at least (\d+)", ended.err)[1])
    enough = write_job(questions, cluster={"page_bytes": needed}, output={"dir": "enough"})
    assert batchinfer("run", enough).code == 0


def test_nothing_but_finished_parquet_files_stands_in_outputs(questions):
    assert batchinfer("run", write_job(questions)).code == 0
    names = [path.name for path in (questions / "run" / "outputs").rglob("*") if path.is_file()]
    assert sorted(names) == ["part-0.parquet", "part-1.parquet", "part-2.parquet"]
    assert not (questions / "run" / "work").exists()


def test_statistics_add_up_and_can_be_queried(questions):
    job = write_job(
        questions, pricing={"gpu_hour": 2.0, "input_hit": 0.14, "input_miss": 0.55, "output": 2.19}, sampling={"n": 2}
    )
    assert batchinfer("run", job, "--trace").code == 0
    run = questions / "run"
    metrics = json.loads(batchinfer("report", run, "--json").out)
    rows = [row for shard in outputs(run).values() for row in shard]
    assert metrics["rows"] == metrics["rows_ok"] == 40
    assert metrics["input_tokens"] == sum(row["prompt_tokens"] for row in rows)
    assert metrics["cached_tokens"] == sum(row["cached_tokens"] for row in rows) == metrics["optimal_cached_tokens"]
    assert metrics["output_tokens"] == sum(row["completion_tokens"] for row in rows)
    assert metrics["wasted_tokens"] == metrics["replicated_tokens"] == 0
    assert metrics["cost_usd"] > 0
    assert metrics["wall_s"] >= metrics["busy_s"] > 0
    sql = "SELECT count(*) AS c FROM outputs JOIN requests USING (row, sample) WHERE outputs.status = 'ok' AND row = 0"
    assert json.loads(batchinfer("report", run, "--json", "--sql", sql).out)[0]["c"] > 0
    assert "40" in batchinfer("report", run, "--sql", "SELECT count(*) FROM outputs").out
    panel = batchinfer("report", run).out
    assert max(map(len, panel.splitlines())) <= 80
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {"prefill", "decode", "commit", "load"} <= {event["name"] for event in events}
    experts = json.loads(
        batchinfer("report", run, "--json", "--sql", "SELECT phase, sum(tokens) AS t FROM experts GROUP BY 1").out
    )
    sql = "SELECT kind, sum(new_tokens) AS t, sum(output_tokens) AS o FROM steps GROUP BY 1"
    steps = json.loads(batchinfer("report", run, "--json", "--sql", sql).out)
    # three of the four layers are mixtures; to the last of them go only tokens that give one; each to four experts
    assert {row["phase"]: row["t"] for row in experts} == {row["kind"]: (row["t"] * 2 + row["o"]) * 4 for row in steps}
