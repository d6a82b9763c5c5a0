"""Products in tiles (AMX): plain C++ with the instructions' order of sums, and what a library with tiles promises.

Where the processor has AMX, all other tests of the C++ operations run with the instructions themselves.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import replace

import pytest

from batchinfer_kernels.cpu import build, compilers
from batchinfer_kernels.cpu.compilers import Step
from support import carried_out
from support.instructions import OFTEN, OPERATIONS, run_code_with, run_tests_with

PLAIN, AMX = "amx-plain", "amx"
AGREE = """
import torch
from batchinfer_kernels.cpu import build
assert build.why_not() is None
print(torch.ops.batchinfer_cpu.tiles_agree(False), torch.ops.batchinfer_cpu.tiles_agree(True))
"""
NAMES = """
import torch
from batchinfer_kernels.cpu import build
print(*map(build.numerics, [torch.float32, torch.bfloat16]))
"""

pytestmark = pytest.mark.usefixtures("cpp")


@pytest.mark.all  # make test: test_products_of_the_instructions_have_the_...
def test_sums_have_the_promised_order_and_not_that_of_other_products():
    assert run_code_with(PLAIN, AGREE).splitlines()[-1] == "True False"


@pytest.mark.all  # make test: the order of sums, below
@pytest.mark.parametrize("which", [OFTEN, pytest.param("", marks=pytest.mark.slow)], ids=["often", "all"])
def test_results_are_as_good_and_keep_their_bits_in_any_company(which):
    run_tests_with(PLAIN, *OPERATIONS, which=which)


@pytest.mark.all  # make test: test_cpu_engine names the family
def test_float32_has_the_family_of_other_instructions_and_bfloat16_one_of_its_own():
    """That their bits are so: test_same_bits."""
    of_tiles, of_others = (run_code_with(name, NAMES).splitlines()[-1].split() for name in (PLAIN, "avx2"))
    assert of_tiles[0] == of_others[0]
    assert of_tiles[1] != of_others[1]


@pytest.mark.all  # make test: test_products_of_the_instructions_have_the_...
def test_the_instructions_themselves_are_compiled(tmp_path):
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump to look into the objects with")
    (amx,) = [known for known in build.INSTRUCTION_SETS if known.name == AMX]
    products = {
        **{name: {"tdpbf16ps"} for name in ("linear", "expert_mlp", "strips", "attention")},
        "byte_strips": {"tdpbssd"},
        "tile_check": {"tdpbf16ps", "tdpbssd"},
        "threads": set(),
    }
    sources = [build.SOURCES / f"{name}.cpp" for name in products]
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    compilers.run(  # what the sources ask for by name is there with any -O
        [
            Step([*build._compiler(), *build._FLAGS, *amx.flags, "-O0", "-c", str(source), "-o", str(target)], target)
            for source, target in zip(sources, objects, strict=True)
        ],
        build.COMPILE_S,
        tmp_path,
    )
    for target in objects:
        said = subprocess.run(["objdump", "-d", str(target)], capture_output=True, text=True, check=True).stdout
        expected = products[target.stem]
        for instruction in ("ldtilecfg", "tileloadd", "tilestored") if expected else ("tilerelease",):
            assert instruction in said, (target.name, instruction)
        assert {name for name in ("tdpbf16ps", "tdpbssd") if name in said} == expected, target.name


ASK_TILES = """
#include <cstdio>
namespace batchinfer { bool tiles_agree(bool is_one_chain); }
int main() { std::printf("%d %d\\n", batchinfer::tiles_agree(false), batchinfer::tiles_agree(true)); }
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86-64 processor")
def test_products_of_the_instructions_have_the_promised_order_of_sums(tmp_path):
    """Carried out one by one where the processor has none of them."""
    source, program = tmp_path / "ask_tiles.cpp", tmp_path / "ask_tiles"
    source.write_text(ASK_TILES)
    carried_out.compile_with(str(build.SOURCES / "tile_check.cpp"), str(source), "-o", str(program))
    assert subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout == "1 0\n"


@pytest.fixture
def plain_is_best(tmp_path, monkeypatch):
    """The plain tiles are what a processor has best, in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(build.CHOICE, raising=False)
    sets = {known.name: known for known in build.INSTRUCTION_SETS}
    best, others = replace(sets[PLAIN], name=AMX, for_tests=False), replace(sets["avx2"], name="others")
    monkeypatch.setattr(build, "INSTRUCTION_SETS", (best, others))
    monkeypatch.setattr(build, "_compile", lambda compiler, folder, chosen: written(folder / "kernels.so"))
    build.instructions.cache_clear()
    yield
    build.instructions.cache_clear()


def written(path):
    path.write_bytes(b"a library")
    return path


def test_tiles_that_go_wrong_are_left_for_good_and_it_is_said(plain_is_best, monkeypatch, capfd):
    monkeypatch.setattr(build, "_ASK_TILES", "import sys; sys.exit('their sums are odd')")
    first = build.library()
    assert first.exists()
    assert "not used for amx here: their sums are odd" in capfd.readouterr().err
    assert build.instructions().name == "others"
    build.instructions.cache_clear()  # as another process finds it
    monkeypatch.setattr(build, "_ASK_TILES", "raise AssertionError('asked again')")
    assert build.library() == first
    assert "not amx: its tiles cannot be relied on (their sums are odd" in build.explain_choice()


def test_tiles_that_bring_their_process_down_are_left_too(plain_is_best, monkeypatch):
    monkeypatch.setattr(build, "_ASK_TILES", "import os; os.kill(os.getpid(), 4)")
    build.library()
    assert build.instructions().name == "others"
    assert "ended with -4" in build.explain_choice()


def test_tiles_that_hang_are_left_too(plain_is_best, monkeypatch):
    monkeypatch.setattr(build, "_ASK_TILES", "import time; time.sleep(600)")
    monkeypatch.setattr(build, "CHECK_S", 0.5)
    build.library()
    assert build.instructions().name == "others"
    assert "its tiles cannot be relied on (the process took longer than 0.5 s" in build.explain_choice()
    assert f"delete {build._refusal_file(build.INSTRUCTION_SETS[0])} to have them tried again" in build.explain_choice()


@pytest.mark.all  # make test: test_tiles_that_go_wrong_...
def test_tiles_of_a_processor_that_did_not_build_the_library_are_tried_when_it_is_loaded():
    code = "from batchinfer_kernels.cpu import build; build._tiles_agree = lambda: False; print(build.why_not())"
    said = run_code_with(PLAIN, code).splitlines()[-1]
    assert said.startswith("the tiles of this processor (")
    assert said.endswith("set BATCHINFER_CPU_FEATURES=avx512")


@pytest.mark.parametrize(
    "said",
    [
        "g++: error: unrecognized command-line option '-mamx-tile'; did you mean '-mavx5124vnniw'?",
        "clang++: error: unknown argument: '-mamx-tile'",
        "{standard input}:2603: Error: no such instruction: `ldtilecfg 16(%rsp)'",
    ],
)
def test_instructions_that_came_after_the_compiler_are_left_and_asked_of_a_newer_one(plain_is_best, monkeypatch, said):
    def compiled(compiler, folder, chosen):
        if build.instructions().tiles:
            raise build.BuildError(f"g++ failed with code 1: {said}")
        return written(folder / "kernels.so")

    monkeypatch.setattr(build, "_compile", compiled)
    monkeypatch.setattr(build, "_UNKNOWN_TO_COMPILER", {})
    assert build.library().exists()
    assert build.instructions().name == "others"
    assert f"not amx: the compiler does not know its instructions (g++ failed with code 1: {said})" in (
        build.explain_choice()
    )
    monkeypatch.setenv(build.CHOICE, AMX)  # by name nothing else is taken
    build.instructions.cache_clear()
    monkeypatch.setattr(build, "_UNKNOWN_TO_COMPILER", {})
    with pytest.raises(build.BuildError, match="failed with code 1"):
        build.library()


def test_a_compiler_that_fails_for_another_reason_is_the_reason(plain_is_best, monkeypatch):
    def failing(compiler, folder, chosen):
        raise build.BuildError("g++ failed with code 1: expected ';'")

    monkeypatch.setattr(build, "_compile", failing)
    with pytest.raises(build.BuildError, match="expected ';'"):
        build.library()


def test_tiles_that_are_right_are_used(plain_is_best, monkeypatch):
    monkeypatch.setattr(build, "_ASK_TILES", "pass")
    build.library()
    assert build.instructions().name == AMX
