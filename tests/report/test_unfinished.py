"""The report of a run that is not finished: what is durable so far, and that it is not all."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinfer
from batchinfer.checked_json import publish_json
from batchinfer.commands.so_far import damaged_files
from batchinfer.report.unfinished import NOT_KNOWN_YET
from batchinfer.rundir import RunDir, read_state
from support.faults import MIXED, SLOW, plan_units, wait_until
from support.jobs import batchinfer as command
from support.jobs import question, start, write_job, write_questions, write_shard
from support.tiers import first_in_make_test

PRICES = {"gpu_hour": 2.0, "input_hit": 0.1, "input_miss": 0.5, "output": 2.0}
# what finishing itself changes: the time that it takes
OF_TIME = {
    "wall_s",
    "rows_per_s",
    "tokens_per_s",
    "idle_s",
    "busy_s",
    "startup_s",
    "gpu_hours",
    "mean_nodes",
    "peak_nodes",
    "unfinished",
    "predictions",
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A job file whose run was killed with -9 midway."""
    folder = tmp_path_factory.mktemp("killed")
    write_questions(folder / "prompts", (10, 6))
    job = write_job(folder, cluster=SLOW, sampling=MIXED, pricing=PRICES)
    run = plan_units(job, folder / "run")
    process = start("run", job)
    wait_until(lambda: any(run.glob("units/*/*/part-*.parquet")), process)
    process.kill()
    process.communicate()
    return job


def report_of(*arguments):
    ended = command("report", *arguments, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def flat(document):
    """Figures by key; those in tables by both."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", item) for name, item in value.items())
        else:
            yield key, value


def test_the_figures_of_a_killed_run_are_of_its_durable_rows(killed):
    run = killed.parent / "run"
    before = sorted(run.rglob("*"))
    found = report_of(killed)
    asked = "SELECT count(*) AS rows, sum(completion_tokens) AS tokens, sum(prompt_tokens) AS prompts FROM results"
    (durable,) = json.loads(command("peek", run, "--json", "--sql", asked).out)
    assert 0 < durable["rows"] < 16
    how_far = found["unfinished"]
    assert (how_far["activity"], how_far["rows_done"], how_far["rows_planned"]) == ("interrupted", durable["rows"], 16)
    assert durable["tokens"] < how_far["tokens_done"] < how_far["tokens_planned"]
    assert (found["rows"], found["rows_ok"], found["rows_error"]) == (durable["rows"], durable["rows"], 0)
    assert (found["output_tokens"], found["input_tokens"]) == (durable["tokens"], durable["prompts"])
    assert found["cost_usd"] == pytest.approx(found["gpu_hours"] * 2.0)
    assert found["revenue_usd"] > 0
    parts = ("startup", "prefill", "decode", "exchange", "tail", "idle")
    assert sum(found[f"{part}_cost_usd"] for part in parts) == pytest.approx(found["cost_usd"])
    assert {found[key] for key in NOT_KNOWN_YET} == {None}
    of_the_whole = found["predictions"]["computed_tokens"]
    assert of_the_whole["planned"] > found["computed_tokens"]
    assert (of_the_whole["happened"], of_the_whole["at_best"]) == (None, None)
    assert sorted(run.rglob("*")) == before, "reading changes nothing"


def test_damaged_files_of_an_unfinished_run_are_named_where_they_are(killed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(killed.parent / "run", run)
    for path in (run / "tokens" / "00000.parquet", run / "plan" / "requests.parquet"):
        content = bytearray(path.read_bytes())
        for share in (0.1, 0.5):
            flipped = int(share * len(content))
            path.write_bytes(content[:flipped] + bytes([content[flipped] ^ 4]) + content[flipped + 1 :])
            ended = command("report", run)
            assert ended.code == 2
            assert f"error: {path} is damaged: " in ended.err
            assert f"batchinfer plan --again {run}" in ended.err
        path.write_bytes(content)
    path = next(run.glob("stats/steps/*.parquet"))
    content = path.read_bytes()
    for damaged in (content[:100] + b"x" + content[101:], content[: len(content) // 2], b""):
        path.write_bytes(damaged)
        ended = command("report", run)
        assert ended.code == 2
        assert f"error: {path} is damaged: " in ended.err
    path.unlink()
    assert command("report", run).code == 0


def test_results_that_are_not_those_that_were_written_are_left_out_with_a_warning(killed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(killed.parent / "run", run)
    before = report_of(run)
    path = min(run.glob("units/*/*/part-*.parquet"))
    table = pq.read_table(path)
    place = table.schema.get_field_index("completion_tokens")
    changed = table.set_column(place, table.field(place), pa.array([1_000_000] * len(table), pa.int32()))
    pq.write_table(changed, path)
    ended = command("report", run, "--json")
    found = json.loads(ended.out)
    assert f"warning: {path} is damaged (its bytes are not those that were written)" in ended.err
    assert found["rows"] == before["rows"] - len(table)
    assert found["output_tokens"] == before["output_tokens"] - sum(table["completion_tokens"].to_pylist())
    assert found["unfinished"]["tokens_done"] < before["unfinished"]["tokens_done"]


@pytest.mark.parametrize(
    ("num_files", "told"),
    [
        (1, "0 is damaged (cut off); it is left out"),
        (3, "3 files are damaged: 0 (cut off), 1 (cut off), 2 (cut off); they are left out"),
        (1004, "1,004 files are damaged: 0 (cut off), 1 (cut off), 2 (cut off) and 1,001 more; they are left out"),
    ],
)
def test_damaged_files_are_one_sentence(num_files, told):
    assert damaged_files({Path(str(number)): "cut off" for number in range(num_files)}) == told


def test_every_form_says_that_a_run_is_unfinished(killed, tmp_path):
    run = killed.parent / "run"
    finished = tmp_path / "whole"
    shutil.copytree(run, finished)
    assert command("run", finished).code == 0
    how_far = report_of(run)["unfinished"]
    assert report_of(finished)["unfinished"] is None
    told = f"unfinished (interrupted): {how_far['rows_done']} of 16 rows, "
    panel = command("report", run)
    assert (panel.code, told in panel.out) == (0, True), panel.err
    assert f"`batchinfer peek {run}` shows the answers so far" in panel.out
    assert "wasted in all                         –" in panel.out
    assert "wasted work" not in panel.out
    assert "unfinished" not in command("report", finished).out
    for options in ((), ("--compare",)):
        shown = command("report", run, finished, *options)
        assert (shown.code, f"run is {told}" in shown.out) == (0, True), shown.err
        assert "whole is unfinished" not in shown.out
    assert report_of(run, finished, "--compare")["unfinished"] == {"before": how_far, "after": None}
    assert [one["unfinished"] for one in report_of(run, finished)] == [how_far, None]
    assert report_of(run, run, finished, "--together")["unfinished"] == how_far, "a run given twice counts once"
    assert command("report", run, finished, "--html", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count(f"This run is {told}") == 1
    assert "run (unfinished)" in page
    assert page.count("at best –") == 1, "it is not known before the end"
    assert "whole (unfinished)" not in page
    job = batchinfer.Job.from_toml(killed)
    assert job.report() == report_of(run)


@pytest.mark.parametrize(
    ("columns", "parts"),
    first_in_make_test(
        [
            ({}, {"sampling": {"n": 2, "temperature": 1.0}}),
            ({"options": [["a", "b c"]] * 7}, {"sampling": {"max_tokens": 0}, "input": {"choices": "options"}}),
        ]
    ),
    ids=["samples", "choices"],
)
def test_what_is_all_computed_has_the_figures_of_the_finished_run(tmp_path, columns, parts):
    prompts = [question(0), None, *map(question, range(5))]  # a bad row, and one like another
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": range(7), "prompt": prompts} | columns)
    job = write_job(tmp_path, **parts)
    assert command("plan", job).code == 0
    assert command("work", job).code == 0
    before = report_of(job)
    assert before["unfinished"]["activity"] == "computed"
    assert before["unfinished"]["rows_done"] == before["unfinished"]["rows_planned"] == before["rows"]
    assert before["unfinished"]["tokens_done"] == before["unfinished"]["tokens_planned"]
    assert before["rows_error"] > 0
    assert command("finish", job).code == 3
    after = report_of(job)
    known = {key: value for key, value in flat(before) if key.partition(".")[0] not in {*OF_TIME, *NOT_KNOWN_YET}}
    assert known == {key: value for key, value in flat(after) if key in known}
    assert "output_tokens" in known


def test_a_run_that_is_only_planned_or_being_planned_has_figures_of_nothing(tmp_path):
    write_questions(tmp_path / "prompts", (2,))
    job = write_job(tmp_path)
    assert command("plan", job).code == 0
    found = report_of(job)
    assert (found["unfinished"]["activity"], found["unfinished"]["rows_planned"], found["rows"]) == ("planned", 2, 0)
    run = RunDir(tmp_path / "run")
    state = read_state(run)
    publish_json(run.run_json, {key: value for key, value in state.items() if key != "counts"} | {"state": "planning"})
    found = report_of(job)
    nothing = {"rows_done": 0, "rows_planned": None, "tokens_done": 0, "tokens_planned": None}
    assert found["unfinished"] == {"activity": "planning", **nothing}
    assert (found["rows"], found["output_tokens"]) == (0, 0)
    assert "unfinished (planning): not planned yet" in command("report", job).out


def test_a_partial_run_counts_its_rows_that_have_an_answer(killed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(killed.parent / "run", run)
    before = report_of(run)
    assert command("finish", run, "--allow-partial").code == 3
    found = report_of(run)
    assert found["unfinished"] == before["unfinished"] | {"activity": "partial"}
    assert found["rows_error"] == 0
    assert sum(len(pq.read_table(path)) for path in (run / "outputs").glob("*")) == 16


def test_the_answers_of_an_unfinished_run_are_asked_with_peek(killed):
    for options in (("--sql", "SELECT 1"), ("--parquet", "views")):
        ended = command("report", killed, *options)
        assert (ended.code, "--sql QUERY` asks the answers so far" in ended.err) == (2, True)
