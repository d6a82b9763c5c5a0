"""What the host says of its processor, and what Intel's matrix library is told: before torch, and not over the user."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from batchinfer import host_info
from batchinfer.launch.rank_process import RankEnvironment, rank_variables

INFO = """processor\t: 0
vendor_id\t: {maker}
cpu family\t: 6
model\t\t: 173
model name\t: A processor of theirs

processor\t: 1
vendor_id\t: another
only second\t: 1
"""


@pytest.fixture
def of_maker(tmp_path, monkeypatch):
    """Sets what this host says of its processor."""

    def say(maker):
        (tmp_path / "cpuinfo").write_text(INFO.format(maker=maker))
        monkeypatch.setattr(host_info, "_INFO", str(tmp_path / "cpuinfo"))

    monkeypatch.delenv("MKL_CBWR", raising=False)
    return say


def test_fields_are_those_of_the_first_processor(of_maker):
    of_maker("GenuineIntel")
    assert host_info.processor_name() == "A processor of theirs"
    assert host_info.processor_kind() == "GenuineIntel/6/173"
    assert host_info.processor_field("only second") is None


def test_a_host_that_says_nothing_has_a_name_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(host_info, "_INFO", str(tmp_path / "none"))
    assert host_info.processor_name()
    assert host_info.processor_kind()
    assert host_info.matrix_library_settings() == {}


def ranks_variables():
    return rank_variables(RankEnvironment(0), num_ranks=1)


@pytest.mark.parametrize(("maker", "expected"), [("GenuineIntel", "AVX2,STRICT"), ("AuthenticAMD", None)])
def test_ranks_get_a_strict_matrix_library_from_intel_alone(of_maker, monkeypatch, maker, expected):
    of_maker(maker)
    assert ranks_variables().get("MKL_CBWR") == expected
    host_info.set_up_matrix_library()
    assert os.environ.pop("MKL_CBWR", None) == expected
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # the user's own stays
    assert ranks_variables()["MKL_CBWR"] == "COMPATIBLE"
    host_info.set_up_matrix_library()
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"


def test_it_is_known_without_importing_torch():
    code = "import sys, batchinfer.host_info, batchinfer.launch.rank_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
