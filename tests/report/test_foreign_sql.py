"""Read-only SQL of other people over run folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from batchinfer.data.schemas.outputs import OUTPUTS
from batchinfer.records import ConfigError, InterruptedRunError
from batchinfer.report.foreign_sql import run_query
from batchinfer.report.query_limits import Deadline
from support.jobs import start
from support.runs import SCHEMAS, output, session, write_run


def query(run: Path, sql: str) -> list[tuple[Any, ...]]:
    return list(run_query([run], sql)[1])


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Path:
    rows = [output(row) for row in range(5)]
    return write_run(tmp_path_factory.mktemp("sql") / "run", outputs={"s.parquet": rows}, nodes=[session("a", 0, 9)])


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT sum(completion_tokens) FROM outputs", [(10,)]),
        ("FROM outputs SELECT id WHERE row = 3; -- the third", [("id-3",)]),
        ("WITH n AS (SELECT * FROM nodes) SELECT session, end_s FROM n", [("a", 9.0)]),
        ("SELECT id FROM outputs ORDER BY row DESC LIMIT 1", [("id-4",)]),
        ("SELECT count(*) FROM (DESCRIBE nodes)", [(21,)]),
        ("SELECT '; DROP VIEW outputs'", [("; DROP VIEW outputs",)]),
        ("VALUES (1), (2)", [(1,), (2,)]),
        ("SELECT TIMESTAMPTZ '2024-01-01 12:00:00+02' AS t, 1 AS t; -- x", [("2024-01-01 10:00:00+00", 1)]),
    ],
)
def test_sql_reads_the_views(small_run, sql, expected):
    assert query(small_run, sql) == expected


def test_show_and_summarize_work(small_run):
    assert {row[0] for row in query(small_run, "SHOW TABLES")} == {"outputs", *SCHEMAS, "decode_steps"}
    assert len(query(small_run, "SUMMARIZE outputs")) == len(OUTPUTS.columns)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_text('{run}/run.json')",
        "SELECT * FROM read_text('{run}/outputs/../run.json')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM 'https://example.com/x.parquet'",
        "SELECT * FROM 's3://bucket/x.parquet'",
        "COPY outputs TO '{run}/out.csv'",
        "COPY outputs TO '{run}/outputs/s.parquet'",
        "COPY (SELECT 1) TO '{run}/outputs/s.parquet' (USE_TMP_FILE false)",
        "WITH x AS (COPY (SELECT 1) TO '{run}/out.parquet') SELECT * FROM x",
        "WITH x AS (COPY (SELECT 1) TO '{run}/outputs/s.parquet' (USE_TMP_FILE false)) SELECT * FROM x",
        "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('WITH x AS (COPY (SELECT 1)"
        " TO ''{run}/outputs/s.parquet'' (USE_TMP_FILE false)) SELECT * FROM x'))",
        "SELECT * FROM query('WITH x AS (COPY (SELECT 1) TO ''{run}/outputs/s.parquet'' (USE_TMP_FILE false)) FROM x')",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{run}/outputs/s.parquet' (USE_TMP_FILE false)",
        "ATTACH '{run}/new.db' AS other",
        "ATTACH ':memory:' AS other",
        "EXPORT DATABASE '{run}/dump'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET allowed_paths = ['/etc/passwd']",
        "RESET lock_configuration",
        "PRAGMA enable_profiling",
        "CALL enable_logging()",
        "SELECT * FROM enable_logging('QueryLog', storage = 'file', storage_path = '{run}/log')",
        "CREATE TABLE mine AS SELECT 1",
        "DROP VIEW outputs",
        "INSERT INTO run SELECT * FROM run",
        "DELETE FROM experts",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP VIEW outputs",
        "",
        "-- only a comment",
        "SELEC 1",
        "SELECT nothing FROM outputs",
        "SELECT * FROM no_such_view",
        "SELECT ?",
        "PIVOT outputs ON row USING sum(prompt_tokens)",
        "SELECT error('stop here')",
        "SELECT '\ud800'",
        "(" * 5000,
    ],
)
def test_sql_that_does_not_only_read_is_refused(small_run, sql):
    before = {path: path.stat().st_mtime_ns for path in small_run.parent.rglob("*")}
    with pytest.raises(ConfigError) as caught:
        query(small_run, sql.replace("{run}", str(small_run)))
    assert "\n" not in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in small_run.parent.rglob("*")} == before


def test_sql_does_not_see_python_variables(small_run):
    hidden = pa.table({"secret": [1]})
    with pytest.raises(ConfigError, match="hidden does not exist"):
        query(small_run, "SELECT * FROM hidden")
    assert hidden.num_rows == 1


def test_a_refusal_names_the_reason_in_one_sentence(small_run):
    with pytest.raises(ConfigError, match=r"--sql only reads: it takes one SELECT .* but got COPY"):
        query(small_run, "COPY outputs TO 'x.csv'")
    with pytest.raises(ConfigError, match=r"the SQL does not run: Binder Error: .*nothing"):
        query(small_run, "SELECT nothing FROM outputs")
    with pytest.raises(ConfigError, match=r"may read the views outputs, .* no other file: .*passwd"):
        query(small_run, "FROM read_text('/etc/passwd')")


def test_errors_in_the_middle_of_a_result_are_sentences(small_run):
    _, rows = run_query(
        [small_run], "SELECT CASE WHEN i = 150000 THEN error('late') ELSE i END FROM range(200000) t(i)"
    )
    with pytest.raises(ConfigError, match="the SQL does not run"):
        list(rows)


def test_a_large_result_is_taken_bit_by_bit(tmp_path):
    # 60,000 texts of 2,000 characters: 120 MB if all of them were held
    text = "x" * 2000
    run = write_run(tmp_path / "r", outputs={"s.parquet": [output(row, text=text) for row in range(2000)]})
    for index in range(1, 30):
        os.link(run / "outputs" / "s.parquet", run / "outputs" / f"s{index}.parquet")
    tracemalloc.start()
    _, rows = run_query([run], "SELECT * FROM outputs")
    assert sum(len(row[5]) for row in rows) == 60_000 * 2000
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 20e6


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT max(hash(i)) FROM range(1000000000000) t(i)",
        "WITH RECURSIVE t AS (SELECT 1 x UNION ALL SELECT x + 1 FROM t) SELECT count(*) FROM t",
        "SELECT levenshtein(repeat('ab', 200000), repeat('ba', 200000))",  # one call: DuckDB cannot stop it
        "SELECT i FROM range(1000000000000) t(i)",
    ],
)
def test_a_query_without_end_is_stopped(small_run, sql):
    with start("report", small_run, "--json", "--sql-seconds", "1", "--sql", sql) as command:
        out, err = command.communicate()
    assert (command.returncode, out) == (2, "")
    assert err == "error: the SQL takes more than 1 s; give it more with --sql-seconds\n"


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("SELECT tex FROM outputs", 'Referenced column "tex" not found in FROM clause!; Candidate bindings: "text"'),
        ("SELECT * FROM output", 'output does not exist!; Did you mean "outputs"?; --sql reads the views '),
        ("SELECT sume(row) FROM outputs", 'name sume does not exist!; Did you mean "sum"?'),
    ],
)
def test_a_name_that_is_not_there_comes_with_what_was_meant(small_run, sql, told):
    with pytest.raises(ConfigError) as error:
        run_query([small_run], sql)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


ENDLESS = "SELECT count(*) FROM range(1000000000000)"


@pytest.mark.parametrize("wait_s", [0, 0.2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_signal_stops_a_query(number, wait_s):
    def handle(*_):
        raise InterruptedRunError("stopped")

    before = signal.signal(number, handle)
    try:
        with duckdb.connect() as connection:
            deadline = Deadline(connection, 60)

            def query():
                os.kill(os.getpid(), number)  # it comes before DuckDB has begun, or after
                time.sleep(wait_s)
                return connection.execute(ENDLESS).fetchall()

            with pytest.raises(InterruptedRunError):
                deadline.call(query)
            assert not deadline.is_stuck
    finally:
        signal.signal(number, before)


def test_a_signal_stops_a_query_also_while_its_thread_starts(monkeypatch):
    class Thread(threading.Thread):
        def start(self) -> None:
            super().start()
            time.sleep(0.2)  # the query runs
            raise InterruptedRunError("stopped")  # as a handler does

    monkeypatch.setattr(threading, "Thread", Thread)
    with duckdb.connect() as connection:
        deadline = Deadline(connection, 60)

        with pytest.raises(InterruptedRunError):
            deadline.call(lambda: connection.execute(ENDLESS).fetchall())
        assert not deadline.is_stuck


def test_a_query_that_is_stopped_before_it_begins_stops():
    with duckdb.connect() as connection:
        deadline = Deadline(connection, 0)

        def query():
            time.sleep(0.1)  # DuckDB drops an interrupt that comes before the query begins
            return connection.execute(ENDLESS).fetchall()

        with pytest.raises(ConfigError, match="takes more than 0 s"):
            deadline.call(query)
        assert not deadline.is_stuck


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT list(i) FROM range(1000000000000) t(i)",
        "SELECT length(repeat('x', 4000000000))",  # DuckDB's own limit does not count it
        "SELECT repeat('x', 300000000) FROM range(100)",  # small for DuckDB, not for who takes the rows
    ],
)
def test_a_query_that_wants_too_much_memory_is_refused(small_run, sql):
    code = (
        "from batchinfer.report import query_limits; query_limits.free_memory_bytes = lambda: 2 << 30;"
        "from batchinfer.program import program; program()"
    )
    command = [sys.executable, "-c", code, "report", small_run, "--json", "--sql", sql]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: the SQL needs more than 1.0 GiB of memory, half of what was free;")


def test_a_result_can_be_left_halfway(small_run):
    _, rows = run_query([small_run], "SELECT * FROM range(1000000000)")
    assert next(rows) == (0,)
    rows.close()
