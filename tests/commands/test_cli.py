"""The command itself: help, usage errors, one-sentence messages, documents on stdout."""

import fcntl
import json
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress

import pytest
import torch

from batchinfer.commands import jobs
from batchinfer.host_info import num_cores, processor_name
from batchinfer.report.summary import MOST_LINES
from batchinfer_kernels import registry
from batchinfer_kernels.cpu.build import instructions
from batchinfer_kernels.row_survey import DTYPES
from support.jobs import batchinfer, question, start, write_job, write_questions, write_shard
from support.paths import RANDOM_MODEL
from support.tiers import first_in_make_test

COMMANDS = (
    "init", "ask", "peek", "plan", "work", "finish", "run", "report", "price", "simulate", "schema", "doctor", "kv"
)  # fmt: skip


def test_help_names_every_command_and_the_exit_codes():
    text = batchinfer("--help").out
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", text, re.M), command
    assert "interrupted; the same command continues" in text
    assert "..." not in text.partition("Commands:")[2], "a summary is cut"
    assert batchinfer().out == text or batchinfer().code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    ended = batchinfer(command, "--help")
    assert ended.code == 0
    assert len(ended.out.splitlines()) > 4


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["run"], ["run", "a.toml", "--bogus"], ["report"], ["plan", "a", "b"]]
)
def test_wrong_usage_ends_with_2(arguments):
    ended = batchinfer(*arguments)
    assert ended.code == 2
    assert "Traceback" not in ended.err


def sentence(ended):
    """The one line that a bad job gets."""
    lines = ended.err.strip().splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("error: ")
    assert ended.out == ""
    return lines[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": {"max_tokens": None}}, ["sampling.max_tokens", "missing"]),
        ({"sampling": {"max_tokens": 0}}, ["sampling.max_tokens", "0"]),
        ({"sampling": {"max_tokens": "many"}}, ["sampling.max_tokens", "many"]),
        ({"sampling": {"temprature": 1}}, ["sampling.temprature", "not a known key"]),
        ({"sampeling": {"n": 1}}, ["sampeling", "not a known part"]),
        ({"input": {"messages": "m"}}, ["prompt", "messages", "exactly one"]),
        ({"input": {"files": ["nowhere/*.parquet"]}}, ["nowhere/*.parquet", "no file"]),
        ({"input": {"files": []}}, ["input.files"]),
        ({"model": {"path": "nowhere"}}, ["nowhere"]),
        ({"model": {"dtype": "int3"}}, ["model.dtype", "int3"]),
        ({"output": {"keep_columns": ["bogus"]}}, ["keep_columns", "bogus"]),
        ({"output": {"keep_columns": ["id"]}}, ["keep_columns", "'id'"]),
        ({"cluster": {"decode_ranks": 4, "prefill_ranks": 2}}, ["decode_ranks is 4", "colocated", "equal"]),
        ({"cluster": {"mode": "disaggregated", "decode_ranks": 2}}, ["prefill_ranks", "disaggregated"]),
        ({"cluster": {"decode_ranks": 0}}, ["decode_ranks", "0"]),
        ({"cluster": {"decode_ranks": 3}}, ["redundant_experts = 2", "3 ranks"]),
        ({"cluster": {"decode_ranks": 2, "exchange": "nccl"}}, ["nccl", "GPU"]),
        ({"cluster": {"backend": "abacus"}}, ["abacus"]),
        ({"cluster": {"page_bytes": 1}}, ["page_bytes", "at least"]),
        ({"kv": {"block_tokens": 100}}, ["block_tokens", "128"]),
    ],
)
def test_a_bad_job_gets_one_sentence_that_names_what_is_wrong(tmp_path, changes, words):
    write_questions(tmp_path / "prompts", (2,))
    ended = batchinfer("run", write_job(tmp_path, **changes))
    assert ended.code == 2, ended.err
    lines = [line for line in ended.err.strip().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_missing_things_are_named(tmp_path):
    assert "nowhere.toml" in sentence(batchinfer("run", tmp_path / "nowhere.toml"))
    assert "batchinfer plan" in sentence(batchinfer("work", write_job(tmp_path)))
    assert "not a run folder" in sentence(batchinfer("finish", tmp_path))
    assert "run folder" in sentence(batchinfer("report", tmp_path))


def test_an_output_folder_with_other_files_in_it_is_left_alone(tmp_path):
    write_questions(tmp_path / "prompts", (2,))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    ended = batchinfer("run", write_job(tmp_path))
    assert ended.code == 2
    assert "holds files but no run" in ended.err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_set_takes_toml_values_and_bare_words(tmp_path):
    write_questions(tmp_path / "prompts", (3,))
    options = ["--set", "output.dir=elsewhere", "--set", "sampling.max_tokens=2", "--set", 'sampling.stop=["x", "y"]']
    assert batchinfer("run", write_job(tmp_path), *options).code == 0
    assert (tmp_path / "elsewhere" / "outputs" / "part-0.parquet").exists()
    text = (tmp_path / "elsewhere" / "job.toml").read_text()
    assert "max_tokens = 2" in text
    assert 'stop = ["x", "y"]' in text


def test_the_run_folders_job_is_complete_and_absolute(tmp_path):
    write_questions(tmp_path / "prompts", (2,))
    assert batchinfer("plan", write_job(tmp_path)).code == 0
    moved = tmp_path / "somewhere"
    moved.mkdir()
    before = os.getcwd()
    os.chdir(moved)
    try:
        assert batchinfer("work", "../run").code == 0
        assert batchinfer("finish", "../run").code == 0
    finally:
        os.chdir(before)


def test_results_go_to_stdout_and_everything_else_to_stderr(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["hello there", None]})
    ended = batchinfer("run", write_job(tmp_path))
    assert ended.code == 3
    assert "warning" in ended.err
    assert "warning" not in ended.out
    json.loads(batchinfer("report", tmp_path / "run", "--json").out)
    both = batchinfer("report", tmp_path / "run", tmp_path / "run", "--json").out
    assert len(json.loads(both)) == 2


def test_sql_may_come_from_a_file_and_may_only_read(tmp_path):
    write_questions(tmp_path / "prompts", (2,))
    assert batchinfer("run", write_job(tmp_path)).code == 0
    (tmp_path / "q.sql").write_text("SELECT count(*) AS n FROM outputs")
    rows = batchinfer("report", tmp_path / "run", "--json", "--sql", f"@{tmp_path / 'q.sql'}").out
    assert json.loads(rows) == [{"n": 2}]
    for sql in ("DROP VIEW outputs", "SELECT * FROM read_csv('/etc/passwd')", "COPY outputs TO '/tmp/x.csv'", "SELEC"):
        ended = batchinfer("report", tmp_path / "run", "--sql", sql)
        assert ended.code == 2
        assert len(ended.err.strip().splitlines()) == 1


def test_schema_lists_every_key_and_every_column():
    text = batchinfer("schema").out
    for key in ("files", "keep_columns", "dtype", "max_tokens", "min_p", "page_bytes", "commit_seconds", "gpu_hour"):
        assert f"  {key} " in text
    stats = batchinfer("schema", "--stats").out
    for view in ("outputs", "requests", "units", "steps", "experts", "nodes", "run"):
        assert re.search(rf"^{view}: ", stats, re.M)
    assert "properties" in json.loads(batchinfer("schema", "--json").out)


def test_doctor_says_of_each_dtype_whether_rows_are_equal_and_in_what():
    ended = batchinfer("doctor")
    assert ended.code == 0
    rows = re.findall(
        r"^ +(float32|bfloat16|fp8) +(equal|NOT EQUAL), in (C\+\+ for [\w-]+|plain PyTorch)", ended.out, re.M
    )
    assert [dtype for dtype, _, _ in rows] == ["float32", "bfloat16", "fp8"]
    for dtype, found, implementation in rows:
        chosen = registry.select("linear", dtype=DTYPES[dtype]).name
        assert implementation == ("plain PyTorch" if chosen == "reference" else f"C++ for {instructions().name}")
        # plain PyTorch may not be on this processor; a run would say so, too
        assert found == "equal" or chosen == "reference", dtype
    found = re.findall(r"^processor +(.+?), (\d+)(?: of \d+)? cores, \d+ threads? for torch$", ended.out, re.M)
    assert found == [(processor_name(), str(num_cores()))]
    assert len(ended.out.splitlines()) < 40


def test_doctor_counts_the_cores_that_a_process_may_use():
    core = min(os.sched_getaffinity(0))
    limited = f"import os; os.sched_setaffinity(0, [{core}])"
    text = f"{limited}; from batchinfer.doctor import machine; print(machine._cores())"
    done = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)
    all_cores = os.cpu_count()
    assert done.stdout == ("1 cores\n" if all_cores == 1 else f"1 of {all_cores} cores\n")


def test_doctor_prints_the_chosen_kernels():
    summary, ended = batchinfer("doctor").out, batchinfer("doctor", "--all")
    assert ended.code == 0
    chosen = re.findall(r"^  \* (\w+) +\w+", ended.out, re.M)
    assert set(chosen) == set(registry.ops())
    for name, dtype in DTYPES.items():
        (line,) = re.findall(rf"^    {name} +((?:\w+ \d+(?:, )?)+)$", summary, re.M)
        counts = {kind: int(count) for kind, count in re.findall(r"(\w+) (\d+)", line)}
        assert counts == Counter(registry.select(op, dtype=dtype).name for op in registry.ops())
    if torch.version.cuda is None:
        for op in ("linear", "grouped_mlp", "masked_mlp", "mla_decode"):
            assert re.search(rf"^ +{op} +hopper +this torch is built without CUDA$", ended.out, re.M), op
        assert re.search(r"^ +not hopper +this torch is built without CUDA$", summary, re.M)
        for exchange in ("nccl", "deepep", "deepep-v1", "deepep-low-latency"):
            assert re.search(rf"^ +{exchange} +this torch is built without CUDA$", ended.out, re.M), exchange


@pytest.mark.all  # make test: doctor prints the chosen kernels, above
def test_doctor_measures_this_machine():
    ended = batchinfer("doctor", "--bench")
    assert ended.code == 0
    assert len(re.findall(r" [\d.,]+ GB/s of weights", ended.out)) == 2
    assert re.search(r"best on this host: (one rank with all threads|\d+ ranks)", ended.out)


def test_a_reader_that_leaves_early_sees_no_traceback():
    process = start("schema", "--stats")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.wait(timeout=60)


@pytest.mark.all  # make test: output on a full disk, below
def test_a_console_that_is_not_utf_8_gets_what_it_can_show(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    out, err = (process := start("--help")).communicate(timeout=100)
    assert process.returncode == 0, err
    assert 'batchinfer report RUN --sql "SELECT \\u2026"' in out


LACKING = {
    "processes": """
import errno, os, subprocess
def refuse(*_):
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
subprocess._fork_exec = refuse
""",
    "threads": """
import threading
def refuse(*_):
    raise RuntimeError("can't start new thread")
from batchinfer import cli
threading.Thread.start = refuse
""",
    "working folder": """
import os
os.rmdir(os.getcwd())
""",
}


@pytest.mark.parametrize(
    ("lack", "said"),
    first_in_make_test(
        [
            ("processes", r"no more processes or threads can be started \(`ulimit -u` is \w+, .*\); raise .*"),
            ("threads", r"no more processes or threads can be started \(`ulimit -u` is \w+, .*\); raise .*"),
            ("working folder", r"the working folder was deleted; `cd` to one that exists"),
        ],
        2,
    ),
)
def test_what_a_machine_does_not_give_is_one_sentence(tmp_path, lack, said):
    write_questions(tmp_path / "prompts", (3,))
    (folder := tmp_path / "folder").mkdir()
    text = f"{LACKING[lack]}\nfrom batchinfer.program import program\nprogram()"
    command = [sys.executable, "-c", text, "plan", str(write_job(tmp_path))]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert re.fullmatch(f"error: {said}", done.stderr.splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def in_a_shell(arguments, streams):
    """Run the command with streams that a shell opens or closes."""
    program = [sys.executable, "-c", "from batchinfer.program import program; program()", *map(str, arguments)]
    command = ["bash", "-c", f'"$@" {streams}', "bash", *program]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.all  # make test: output on a full disk, below
def test_closed_streams_change_no_exit_code(tmp_path):
    write_questions(tmp_path / "prompts", (3,))
    done = in_a_shell(["run", write_job(tmp_path)], "<&- >&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert batchinfer("verify", tmp_path / "run").code == 0
    assert in_a_shell(["report", tmp_path / "nothing"], ">&- 2>&-").returncode == 2


@pytest.mark.all  # make test: output on a full disk, below
@pytest.mark.parametrize("log", ["/dev/full", ">(true)"])
def test_a_run_does_not_depend_on_its_log(tmp_path, log):
    write_questions(tmp_path / "prompts", (3,))
    done = in_a_shell(["run", write_job(tmp_path)], f"2> {log}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "output rows" in done.stdout


@pytest.mark.parametrize("stream", first_in_make_test(["stdout", "stderr"]))
def test_a_stream_that_another_program_has_made_one_that_does_not_wait_is_waited_for(stream):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    arguments = ["schema"] if stream == "stdout" else ["report", "nothing"]
    command = [sys.executable, "-c", "from batchinfer.program import program; program()", *arguments]
    with subprocess.Popen(command, **{stream: writer}) as running:
        os.close(writer)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(3)
        with open(reader, "rb") as pipe:
            got = pipe.read().lstrip(b"x")
    if stream == "stdout":
        assert got.decode() == batchinfer("schema").out
        assert running.returncode == 0
    else:
        assert got.startswith(b"error: ")
        assert running.returncode == 2


def test_output_on_a_full_disk_is_one_sentence():
    done = in_a_shell(["schema"], "> /dev/full")
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device: 'standard output'\n")


def test_progress_is_plain_lines_when_nobody_watches(tmp_path):
    write_questions(tmp_path / "prompts", (3,))
    process = start("run", write_job(tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "\r" not in err
    assert re.search(r"computing: 100%, 3 of 3 rows; [\d,]+ tokens/s; .* prompt and .* output tokens", err)
    assert re.search(r"planning: 100%, 3 of 3 rows", err)
    assert re.search(r"loading: 100%, .*MB of .*MB in", err)
    assert re.search(r"finish: 100%, 3 of 3 rows", err)
    assert "3 rows in" in err, "stdout is elsewhere"
    assert re.search(r"^  rows +3 output rows: 3 ok, 0 error$", out, re.M)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A job file with five kinds of bad rows, and what its run ended with."""
    folder = tmp_path_factory.mktemp("finished")
    bad = [None, "x" * 9000, "y" * 9001, "z" * 9002, "z" * 9003]
    columns = {"id": [f"q{i}" for i in range(9)], "prompt": [*bad, None, None, question(1), question(1)]}
    write_shard(folder / "prompts/a.parquet", columns)
    job = write_job(folder, output={"keep_columns": []})
    return job, batchinfer("run", job)


def test_a_run_ends_with_a_summary_of_a_few_lines(finished):
    job, ended = finished
    run = job.parent / "run"
    assert ended.code == 3
    lines = ended.out.splitlines()
    assert len(lines) <= MOST_LINES == 25
    assert lines[:4] == [
        "run: finished",
        "  rows      9 output rows: 2 ok, 7 error",
        "  cut       2 at max_tokens, 100.0% of answers: raise max_tokens?",
        "  errors    3 x prompt is null",
    ]
    assert lines[6] == "            and 2 other reasons"
    report = json.loads(batchinfer("report", run, "--json").out)
    assert re.fullmatch(r"  speed     [\d.,]+ rows/s, [\d.,]+ tokens/s, end to end", lines[-5])
    hits = f"({report['cache_hit_rate']:.1%} from a cache)"
    assert lines[-4] == f"  tokens    {report['input_tokens']:,} in {hits}, {report['output_tokens']:,} out"
    assert lines[-3] == f"  outputs   {run}/outputs"
    assert lines[-1] == f"  page      batchinfer report {run} --html run.html"
    assert "money" not in ended.out, "the job has no prices"
    assert "$" not in ended.out


def test_a_summary_names_shards_without_outputs(tmp_path):
    write_questions(tmp_path / "prompts", (1,))
    (tmp_path / "prompts" / "broken.parquet").write_bytes(b"not parquet")
    ended = batchinfer("run", write_job(tmp_path))
    assert ended.code == 3
    assert f"\n  no output {tmp_path}"[:40] in ended.out  # the path's end may be cut
    assert "  rows      1 output row: 1 ok, 0 error" in ended.out


def test_a_summary_has_money_where_the_job_has_prices(finished):
    job, _ = finished
    prices = ["gpu_hour=2", "input_hit=1", "input_miss=1", "output=2"]
    options = [word for price in prices for word in ("--set", f"pricing.{price}")]
    assert re.search(
        r"^  money     cost \$[\d.]+, revenue \$[\d.]+, gross margin", batchinfer("run", job, *options).out, re.M
    )


def test_run_json_is_the_document_of_the_report(finished):
    job, _ = finished
    ended = batchinfer("run", job, "--json")
    assert ended.code == 3
    assert json.loads(ended.out) == json.loads(batchinfer("report", job, "--json").out)


def test_quiet_says_nothing_and_verbose_prints_the_whole_report(finished):
    job, _ = finished
    quiet = batchinfer("run", job, "--quiet")
    assert (quiet.code, quiet.out) == (3, "")
    assert all(line.startswith("warning: ") for line in quiet.err.splitlines())
    assert batchinfer("plan", job, "-q").out == ""
    verbose = batchinfer("run", job, "-v")
    assert batchinfer("report", job).out in verbose.out
    assert verbose.out.splitlines()[-1].startswith("  page ")
    assert "planned in" in batchinfer("plan", job).out, "the next command is neither"
    assert "contradict" in batchinfer("run", job, "-q", "-v").err


def test_a_verbose_plan_lists_every_bad_row(tmp_path):
    prompts = tmp_path / "prompts"
    write_shard(prompts / "a.parquet", {"id": ["x", None, "z"], "prompt": ["", None, "good"]})
    write_shard(prompts / "b.parquet", {"id": ["u", "v"], "prompt": ["good", ""]})
    (prompts / "c.parquet").write_bytes(b"nothing")
    job = write_job(tmp_path)
    for _ in range(2):  # a plan that is there is not made again
        planned = batchinfer("plan", job, "-v")
        assert planned.code == 0, planned.err
        assert [line for line in planned.out.splitlines() if ", row " in line] == [
            f"{prompts}/a.parquet, row 0, id x: prompt is empty",
            f"{prompts}/a.parquet, row 1: prompt is null",
            f"{prompts}/b.parquet, row 1, id v: prompt is empty",
        ]
    assert ", row " not in batchinfer("plan", job).out


def test_a_run_waits_for_another_that_finishes(finished, monkeypatch):
    """Two runs at once share the work; the one that comes second to finish takes the result of the first."""
    job, ended = finished
    with open(job.parent / "run" / "plan.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        looks = []

        def look(seconds):
            looks.append(seconds)
            fcntl.flock(file, fcntl.LOCK_UN)

        monkeypatch.setattr(jobs.time, "sleep", look)
        waited = batchinfer("run", job)
    assert looks == [jobs.LOOK_S]
    assert waited.err.count("waiting: another process plans or finishes") == 1
    assert (waited.code, waited.out.splitlines()[1]) == (3, ended.out.splitlines()[1])


@pytest.mark.parametrize(("ending", "code", "said"), [("3", 3, ""), ("'why'", 1, "why\n"), ("None", 0, "")])
def test_the_program_ends_with_what_the_command_ends_with(ending, code, said):
    end = f"cli.main = lambda *processes: sys.exit({ending}); print('out'); program()"
    text = f"import sys; from batchinfer import cli; from batchinfer.program import program; {end}"
    done = subprocess.run([sys.executable, "-c", text], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "out\n", said)


@pytest.mark.all  # make test: what the program ends with, above
def test_the_program_ends_whatever_its_threads_wait_for():
    waits = "import threading; threading.Thread(target=threading.Event().wait).start()"
    text = (
        f"{waits}; from batchinfer import cli; from batchinfer.program import program;"
        "cli.main = lambda *processes: 1 / 0; program()"
    )
    done = subprocess.run([sys.executable, "-c", text], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


INTERRUPTED_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[2]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from batchinfer.program import program
program()
"""


@pytest.mark.parametrize(
    "module",
    first_in_make_test(
        ["batchinfer.own_process", "batchinfer.records", "batchinfer.launch.rank_process", "batchinfer.cli"]
    ),
)
def test_an_interrupt_while_modules_are_imported_is_one_sentence(module):
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, "run", module]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (75, "stopped by SIGINT; run the same command to go on\n")


@pytest.mark.all  # make test: while modules are imported, above
def test_an_interrupt_of_which_python_makes_another_error_is_one_sentence():
    """Python 3.11 does, in the body of a class."""
    text = "from batchinfer import cli, program; cli.main = lambda *processes: exec(WRAPPED); program.program()"
    wrapped = "try: raise KeyboardInterrupt\nexcept BaseException as error: raise RuntimeError('set_name') from error"
    command = [sys.executable, "-c", f"WRAPPED = {wrapped!r}\n{text}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, "stopped by SIGINT; run the same command to go on\n")


@pytest.mark.all  # make test: an interrupt while modules are imported, above
def test_a_signal_while_duckdb_is_imported_comes_afterwards(tmp_path):
    """DuckDB calls Python while it is imported, and ends the process if that raises."""
    write_questions(tmp_path / "prompts", (3,))
    assert batchinfer("plan", write_job(tmp_path)).code == 0
    text = INTERRUPTED_IMPORT.replace("SIGINT)", "SIGTERM)\n            print('goes on')")
    text = text.replace("sys.argv[2]:", "'duckdb':")
    command = [sys.executable, "-c", text, "finish", tmp_path / "run"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (75, "goes on\n")
    assert done.stderr == "stopped by SIGTERM; run the same command to go on\n"


def test_signals_behind_the_end_of_a_command_change_nothing():
    text = """
import os, sys
from batchinfer import cli, program
from batchinfer.data.tokenizer_process import TokenizerProcess
from batchinfer.stop_signals import SIGNALS, StopSignal

def main(*_):
    StopSignal()
    sys.exit(3)

def end(self, end=TokenizerProcess.end):
    for number in (*SIGNALS, *SIGNALS):
        os.kill(os.getpid(), number)
    end(self)

cli.main, TokenizerProcess.end = main, end
program.program()
"""
    done = subprocess.run([sys.executable, "-c", text, "run"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


@pytest.mark.all  # make test: importing the package loads nothing large, in test_generation
def test_no_process_of_a_run_imports_pandas(tmp_path, monkeypatch):
    """Arrow would, wherever it is installed: half of the time that a small run takes."""
    library, seen = tmp_path / "library", tmp_path / "seen"
    library.mkdir()
    seen.mkdir()
    (library / "pandas.py").write_text(f"import os\nopen(f'{seen}/{{os.getpid()}}', 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(library), os.environ.get("PYTHONPATH")])))
    write_questions(tmp_path / "prompts", (3,))
    process = start("run", write_job(tmp_path))
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert not list(seen.iterdir())


@pytest.mark.parametrize("command", first_in_make_test(["run", "ask"]))
def test_nothing_in_the_working_folder_is_executed(tmp_path, monkeypatch, command):
    """A folder of data may contain files with the names of modules."""
    write_questions(tmp_path / "prompts", (3,))
    job, folder = write_job(tmp_path), tmp_path / "data"
    folder.mkdir()
    for name in (
        "torch",
        "tokenizers",
        "queue",
        "pyarrow",
        "numpy",
        "json",
        "click",
        "batchinfer",
        "batchinfer_kernels",
    ):
        (folder / f"{name}.py").write_text("open(__file__ + '.executed', 'w').close()\n")
    monkeypatch.chdir(folder)
    arguments = ["run", job] if command == "run" else ["ask", "What?", "--model", RANDOM_MODEL, "--max-tokens", "2"]
    # as the console script, which does not look there either
    program = [sys.executable, "-P", "-c", "from batchinfer.program import program; program()", *map(str, arguments)]
    ended = subprocess.run(program, check=False, capture_output=True, text=True)
    assert not list(folder.glob("*.executed"))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.all  # make test: while modules are imported, above
def test_an_error_that_a_library_makes_of_an_interrupt_is_an_interrupt():
    text = """
import os, signal
from batchinfer import cli, program
def as_duckdb_does(**_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        raise RuntimeError("Query interrupted") from None
cli.cli.main = as_duckdb_does
program.program()
"""
    done = subprocess.run([sys.executable, "-c", text], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == "stopped by SIGINT; run the same command to go on\n"


def test_an_interrupt_before_the_command_has_begun_is_one_sentence():
    text = "from batchinfer import cli, program; cli.main = lambda *processes: exec('raise KeyboardInterrupt')"
    done = subprocess.run(
        [sys.executable, "-c", f"{text}; program.program()"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == "stopped by SIGINT; run the same command to go on\n"
