"""The C++ operations compiled for AVX2 alone, as older processors get them: the tests of the others hold there, too.

They run in a process of their own, which is told to use AVX2 also where the processor could do better.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.instructions import FOR_X86
from support.compressed_models import published_tensors, random_model, write_compressed
from support.instructions import OFTEN, OPERATIONS, run_code_with, run_tests_with, run_with
from support.jobs import answers, write_job, write_questions

pytestmark = pytest.mark.all  # what the other files show, on other instructions; make test: test_same_bits

(AVX2,) = (known for known in FOR_X86 if known.name == "avx2")
# What only AVX-512 has: its wide and its additional registers, and masks.
BEYOND_AVX2 = re.compile(r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b")
LIBRARY = "from batchinfer_kernels.cpu import build; assert build.why_not() is None; print(build.library())"
DIGEST = (
    "import sys, pathlib, torch\n"
    "from batchinfer_kernels.cpu import build\n"
    "from support.paged_steps import digest_of_logits\n"
    "assert build.why_not() is None\n"
    "with torch.inference_mode():\n"
    "    print(digest_of_logits(pathlib.Path(sys.argv[1])))\n"
)
EXPLAIN = "from batchinfer_kernels.cpu import build; print(build.explain())"


@pytest.fixture(autouse=True, scope="module")
def _supported():
    try:
        reason = build.why_not_for(AVX2)
        build._compiler()
    except build.BuildError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"the C++ operations for AVX2 cannot run here: {reason}")


@pytest.mark.parametrize("which", [OFTEN, pytest.param("", marks=pytest.mark.slow)], ids=["often", "all"])
def test_results_are_as_good_and_keep_their_bits_in_any_company(which):
    run_tests_with(AVX2.name, *OPERATIONS, which=which)


def test_no_instruction_in_it_is_beyond_avx2():
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump to look into the library with")
    library = run_code_with(AVX2.name, LIBRARY).splitlines()[-1]
    said = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True
    ).stdout
    assert "vfmadd" in said
    assert "%ymm15" in said
    assert [line for line in said.splitlines() if BEYOND_AVX2.search(line)] == []


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16", pytest.param("fp8", marks=pytest.mark.slow)]
)
def test_a_job_has_the_same_bytes_and_takes_what_others_have_stored(dtype, tmp_path):
    best = next(known.name for known in build.INSTRUCTION_SETS if not known.tiles and build.why_not_for(known) is None)
    if best == AVX2.name:
        pytest.skip("this processor has nothing better")
    write_questions(tmp_path / "prompts", (3, 2))
    found = {}
    for name in (best, AVX2.name):
        job = write_job(
            tmp_path,
            name=f"{name}.toml",
            output={"dir": name},
            model={"dtype": dtype},
            sampling={"max_tokens": 8, "logprobs": 2, "temperature": 0.7},
            kv={"dir": str(tmp_path / "kv"), "persist": "all"},
        )
        run_with(name, "-m", "batchinfer", "run", str(job))
        found[name] = answers(tmp_path / name)
    assert found[best] == found[AVX2.name]
    sql = "SELECT sum(hit_blocks)::INT AS hits FROM kv"
    said = run_with(AVX2.name, "-m", "batchinfer", "report", str(tmp_path / AVX2.name), "--json", "--sql", sql)
    assert json.loads(said)[0]["hits"] > 0


def test_a_model_of_compressed_entries_has_the_same_bits(tmp_path):
    best = next(known.name for known in build.INSTRUCTION_SETS if not known.tiles and build.why_not_for(known) is None)
    if best == AVX2.name:
        pytest.skip("this processor has nothing better")
    folder = write_compressed(tmp_path, published_tensors(random_model()))
    digests = [run_code_with(name, DIGEST, str(folder)).splitlines()[-1] for name in (best, AVX2.name)]
    assert digests[0] == digests[1]


def test_doctor_says_why_better_instructions_are_not_in_use():
    if build.instructions().name == AVX2.name:
        pytest.skip("this processor has nothing better")
    assert run_code_with(AVX2.name, EXPLAIN).splitlines()[-1] == f"for avx2, as {build.CHOICE} says"
