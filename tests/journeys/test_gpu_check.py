"""The script that checks operations on a GPU, rehearsed on the CPU: all of it but the times and the card."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from batchinfer_kernels import registry
from batchinfer_kernels.hopper import libraries
from support.cuda_stand_ins import CpuAsCard, events_on_the_cpu, hopper_on_the_cpu, needs_interpreter
from support.paths import ROOT

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import accelerator
import candidates
import check
import exact
import supervised as supervised_module
from accelerator import Limits
from cases import ALL, TINY, Case, Dims, Work, normal
from gqa_cases import gqa_cases
from summary import summary
from supervised import read_record, supervise, write_line
from wheels import WheelError, unpack_wheels

CPU = torch.device("cpu")


@pytest.fixture
def hopper_libraries(monkeypatch):
    hopper_on_the_cpu(monkeypatch)
    before = registry.fallbacks()
    yield
    assert registry.fallbacks() == before, "what is checked went to another implementation"
    libraries.decode_parameters.cache_clear()
    libraries.makes_own_metadata.cache_clear()


@pytest.mark.all  # make test: wrong operations, below
@needs_interpreter
def test_the_rehearsal_checks_every_operation_of_both_candidates(hopper_libraries, capsys):
    assert check.main(["--rehearse", "--json"]) == check.OK
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert {row["op"] for row in rows if row["candidate"] == "triton"} >= set(registry.ops()) - candidates.PLAIN
    assert {row["op"] for row in rows if row["candidate"] == "hopper"} == set(candidates._HOPPER_PROBES)
    assert not document["not_run"]
    for row in rows:
        assert row["error"] <= exact.TOLERANCE[row["measure"]]
        # `linear` alone: a single product of one group has no other rows in its batch
        assert row["company"] == ("" if row["op"] == candidates.DENSE else "same")
        assert row["ms"] is row["tflops"] is row["gb_s"] is row["first_s"] is None, "a CPU's times say nothing"


@needs_interpreter
def test_the_table_says_what_is_checked_and_what_cannot_run(capsys):
    assert check.main(["--rehearse", "--only", "silu_mul", "linear"]) == check.OK
    out = capsys.readouterr().out
    assert "no times are taken" in out
    assert "3 checks, 0 failed" in out
    assert "not run: hopper linear" in out
    lines = [line for line in out.splitlines() if line.startswith(("silu_mul", "linear"))]
    assert [line.split()[:2] for line in lines] == [["linear", "triton"]] * 2 + [["silu_mul", "triton"]]


def doubled(x, y):
    return 2 * x


def by_company(x, y):
    return x * (1 + len(x))


def broken(x, y):
    raise RuntimeError("out of\nresources")


def nothing_finite(x, y):
    return x / 0


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (doubled, "error"),
        (by_company, "bits depend on the rows beside it"),
        (broken, "RuntimeError: out of resources"),
        (nothing_finite, "error inf"),
    ],
)
def test_a_wrong_operation_fails_its_row(monkeypatch, capsys, function, sentence):
    x = normal(12, 16, device=CPU)
    right = 13 * x if function is by_company else x
    work = Work(lambda run, rows: run(x[rows], x[rows]), right.double, "relative", (slice(2, 5),), 0, 0)
    monkeypatch.setattr(check, "all_cases", lambda *args, **options: [Case("silu_mul", "12 x 16", lambda device: work)])
    monkeypatch.setattr(candidates, "why_not", lambda name, op: None)
    monkeypatch.setattr(candidates, "function", lambda name, op: function)
    assert check.main(["--rehearse"]) == check.FAILED
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("silu_mul"))
    assert "FAILED" in line
    assert sentence in line


@pytest.mark.parametrize(
    "wrong",
    [
        lambda form: form._replace(window=form.window and form.window + 1),
        lambda form: form._replace(sinks_H=None),
        lambda form: form._replace(scale=1.05 * form.scale),
    ],
    ids=["window", "sinks", "scale"],
)
@pytest.mark.parametrize("op", ["gqa_decode", "gqa_prefill", "gqa_decode_fp8", "gqa_prefill_fp8"])
def test_grouped_query_attention_of_another_form_is_not_taken_for_right(op, wrong):
    right = registry.bind(op, (registry.REFERENCE,))
    cases = [
        case for case in gqa_cases(TINY, is_tiny=True, is_quick=False) if case.op == op and "gpt-oss" in case.shape
    ]
    for work in (case.make(CPU) for case in cases):
        expected, bound = work.expected(), exact.TOLERANCE[work.measure]
        result, other = (
            work.run(lambda *args, change=change: right(*args[:-1], change(args[-1])), ALL)
            for change in (lambda form: form, wrong)
        )
        assert exact.error(work.measure, result, expected) <= bound < exact.error(work.measure, other, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys):
    assert check.main([]) == check.UNUSABLE
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "needs a Hopper GPU" in error
    assert "--rehearse" in error


@needs_interpreter
def test_a_kernel_that_brings_its_process_down_costs_its_own_row(tmp_path, monkeypatch, capsys):
    trap = """
import os, sys
if "--work" in sys.orig_argv:
    from dataclasses import replace
    from batchinfer_kernels.triton import ops
    ops.silu_mul = replace(ops.silu_mul, run=lambda *args: os.kill(os.getpid(), 11))
"""
    (tmp_path / "sitecustomize.py").write_text(trap)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT / 'kernels'}")
    operations = ["rms_norm", "silu_mul", "argmax"]
    arguments = ["--rehearse", "--out", str(tmp_path / "check.jsonl"), "--only", *operations]
    assert check.main(arguments) == check.FAILED
    out = capsys.readouterr().out
    assert "3 checks, 1 failed" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith(tuple(operations))}
    assert "FAILED its process ended: killed by SIGSEGV" in lines["silu_mul"]
    assert "FAILED" not in lines["rms_norm"] + lines["argmax"]
    summed_up = summary(tmp_path)
    assert "FAILED silu_mul, triton, 37 x 128: its process ended: killed by SIGSEGV" in summed_up
    assert "| argmax | triton | 37 x 300 | 0.0e+00 unequal | same |" in summed_up
    # what the file has is not run again
    monkeypatch.setattr(subprocess, "Popen", None)
    assert check.main(arguments) == check.FAILED
    assert capsys.readouterr().out == out


CHILD = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, GPU)
from supervised import read_record, write_line
path, plan = Path(sys.argv[1]), sys.argv[2:]
record = read_record(path)
if record.header is None:
    write_line(path, machine={})
for word in plan:
    key, _, what = word.partition(":")
    if key in record.done:
        continue
    write_line(path, begun=key)
    if what == "dies":
        os._exit(3)
    if what == "hangs":
        time.sleep(60)
    write_line(path, done=key, row={"failure": "", "word": what})
    if what == "asks":
        sys.exit(17)
""".replace("GPU", repr(str(Path(check.__file__).parent)))


def supervised(path, *plan, silent_s=20.0, minutes=None):
    command = [sys.executable, "-c", CHILD, str(path), *plan]
    keys = [word.partition(":")[0] for word in plan]
    end_s = None if minutes is None else time.monotonic() + 60 * minutes
    return supervise(command, keys, path, silent_s=silent_s, end_s=end_s), read_record(path)


@pytest.mark.all  # make test: a kernel that brings its process down, above
def test_work_goes_on_behind_a_piece_that_kills_or_stops_it(tmp_path):
    why_not, record = supervised(tmp_path / "a", "a:fine", "b:dies", "c:asks", "d:hangs", "e:fine", silent_s=1.5)
    assert why_not is None
    assert [line["row"]["word"] if "row" in line else line["died"] for line in record.done.values()] == [
        "fine",
        "exit code 3",
        "asks",
        "it said nothing for 2 s and was killed",
        "fine",
    ]


def test_work_that_cannot_begin_is_given_up_with_its_reason(tmp_path):
    why_not = supervise([sys.executable, "-c", "exit(5)"], ["a"], tmp_path / "a", silent_s=20, end_s=None)
    assert why_not == "the process that does the work ends before it has begun (exit code 5)"


@pytest.mark.all  # make test: a kernel that brings its process down, above
def test_work_stops_when_time_is_up_and_goes_on_later(tmp_path):
    why_not, record = supervised(tmp_path / "a", "a:fine", "b:hangs", "c:fine", minutes=0.02)
    assert why_not == "time is up: 2 of 3 are not done"
    assert list(record.done) == ["a"]
    with (tmp_path / "a").open("ab") as file:
        file.write(b'{"done": "b", "ro')  # a line that was cut off
    why_not, record = supervised(tmp_path / "a", "a:fine", "b:fine", "c:fine")
    assert why_not is None
    assert list(record.done) == ["a", "b", "c"]


def test_what_failed_is_done_again_once_the_sources_are_others(tmp_path, monkeypatch):
    file = tmp_path / "a"
    write_line(file, machine={})
    write_line(file, done="fine", row={"failure": ""})
    write_line(file, done="wrong", row={"failure": "error 1"})
    write_line(file, done="dies", died="exit code 3")
    write_line(file, done="lacks", not_run="no deep_gemm")
    write_line(file, done="no number", figures={"is_finite": False})
    keys = ["fine", "wrong", "dies", "lacks", "no number", "new"]
    assert read_record(file).left(keys) == ["new"]
    monkeypatch.setattr(supervised_module, "sources", lambda: "others")
    assert read_record(file).left(keys) == keys[1:]
    write_line(file, done="dies", row={"failure": ""})
    assert read_record(file).left(keys) == ["wrong", "lacks", "no number", "new"]


def test_all_checks_have_names_of_their_own():
    for options in ({}, {"is_quick": True}):
        cases = check.all_cases(Dims(), **options)
        assert len(check.jobs_of(cases)) == sum(len(case.names) for case in cases)


def test_an_unknown_operation_is_named(capsys):
    assert check.main(["--rehearse", "--only", "gemm"]) == check.UNUSABLE
    assert "there is no operation gemm; known are product, dense" in capsys.readouterr().err


def test_errors_are_measured_as_they_are_named():
    exact_values = torch.tensor([1.0, -4.0, 2.0], dtype=torch.float64)
    assert exact.error("relative", torch.tensor([1.0, -4.0, 2.5]), exact_values) == 0.5 / 4
    assert exact.error("unequal", torch.tensor([1.0, -4.0, 2.5]), exact_values) == 1
    # 1 - 2 * 2 * 21 / (4 * 21 + 21)
    assert exact.error("diff", 2 * exact_values, exact_values) == pytest.approx(0.2)
    assert exact.error("diff", torch.tensor([1.0, torch.nan, 2.5]), exact_values) == torch.inf
    assert exact.error("relative", torch.ones(2), exact_values) == torch.inf


def test_rates_come_from_operands_and_times():
    # one product of 4 x 8 x 16 in half a second: 1,024 operations; 128 + 256 + 64 bytes
    limits = Limits(bf16_tflops=1e-8, fp8_tflops=2e-8, copy_gb_s=1e-6)
    row = check.Row("linear", "triton", "4 x 8 x 16")
    work = Work(lambda run, rows: torch.ones(4), lambda: torch.ones(4), "relative", (), 2 * 4 * 8 * 16, 448)

    class Clock:
        def wait(self):
            pass

        def seconds(self, run):
            run()
            return 0.5

    check._check_and_time(row, work, Clock(), limits)
    assert row.ms == 500
    assert row.tflops == pytest.approx(2048e-12)
    assert row.gb_s == pytest.approx(896e-9)
    assert row.share == pytest.approx(0.896)


def test_times_are_medians_and_limits_come_from_them(monkeypatch):
    events_on_the_cpu(monkeypatch)
    for name, small in {"_MATRIX": 64, "_COPY_BYTES": 2**16, "_FLUSH_BYTES": 2**16}.items():
        monkeypatch.setattr(accelerator, name, small)
    card = CpuAsCard(CPU, runs=3)
    calls = []
    assert card.seconds(lambda: calls.append(1)) > 0
    assert len(calls) == 3
    seconds = iter([1e-6, 2e-6, 4e-6])
    monkeypatch.setattr(CpuAsCard, "seconds", lambda self, run: (run(), next(seconds))[1])
    limits = card.limits()
    assert limits.bf16_tflops == pytest.approx(2 * 64**3 / 1e6)
    assert limits.fp8_tflops == pytest.approx(64**3 / 1e6)
    assert limits.copy_gb_s == pytest.approx(2 * 2**16 / 4e3)


def test_the_shapes_are_those_of_the_published_table():
    cases = check.all_cases(Dims())
    assert sum(case.published is not None for case in cases) == 18 + 4 + 6 + 4
    quick = check.all_cases(Dims(), is_quick=True)
    assert {case.op for case in quick} == {case.op for case in cases}
    assert len(quick) < len(cases)
    assert {case.op for case in cases} >= set(registry.ops()) - candidates.PLAIN
    assert not any(case.published for case in check.all_cases(TINY, is_tiny=True))


def test_wheels_are_unpacked_onto_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with zipfile.ZipFile(tmp_path / "brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought_along/__init__.py", "from brought_along.more import answer\n")
        wheel.writestr("brought-1.0.data/platlib/brought_along/more.py", "answer = 42\n")
    assert unpack_wheels(tmp_path) == ["brought-1.0-py3-none-any.whl"]
    import brought_along

    assert brought_along.answer == 42
    del sys.modules["brought_along"], sys.modules["brought_along.more"]


def test_a_folder_without_good_wheels_is_named(tmp_path, capsys):
    assert check.main(["--rehearse", "--wheels", str(tmp_path)]) == check.UNUSABLE
    assert f"{tmp_path} has no *.whl files" in capsys.readouterr().err
    (tmp_path / "bad.whl").write_text("no zip")
    with pytest.raises(WheelError, match=r"bad\.whl is no wheel"):
        unpack_wheels(tmp_path)
