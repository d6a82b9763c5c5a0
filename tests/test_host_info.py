"""Processor and limits of the host, and settings of Intel's matrix library, which never override the user's."""

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


MB = 1 << 20


@pytest.fixture
def in_groups(tmp_path, monkeypatch):
    """Sets the control groups of this process, and files of a tree of them."""

    def place(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    monkeypatch.setattr(host_info, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host_info, "_GROUPS", tmp_path / "groups")
    return place


def test_of_the_memory_limits_of_a_group_and_those_above_it_the_least_counts(in_groups):
    #   /                      no limit file, as in a root group
    #   /job      50 - 45 MB   the whole Slurm job
    #   /job/step 30 - 10 MB
    stat = f"anon 7\ninactive_file {2 * MB}\nactive_file {MB}"
    in_groups(
        "0::/job/step\n",
        {
            "job/memory.max": 50 * MB,
            "job/memory.current": 45 * MB,
            "job/memory.stat": stat,
            "job/step/memory.max": 30 * MB,
            "job/step/memory.current": 10 * MB,
        },
    )
    assert host_info.free_memory_bytes() == 8 * MB


def test_memory_limits_of_version_1_are_seen(in_groups):
    in_groups(
        "4:cpuset:/other\n3:cpu,cpuacct:/other\n2:memory:/job/step\n0::/\n",
        {
            "memory/memory.limit_in_bytes": 9223372036854771712,
            "memory/memory.usage_in_bytes": 60 * MB,
            "memory/job/step/memory.limit_in_bytes": 30 * MB,
            "memory/job/step/memory.usage_in_bytes": 10 * MB,
            "memory/job/step/memory.stat": f"active_file {5 * MB}\ntotal_inactive_file {MB}\ntotal_active_file {MB}",
        },
    )
    assert host_info.free_memory_bytes() == 22 * MB


def test_a_container_that_sees_its_own_group_alone_keeps_to_it(in_groups):
    # the path is the host's, the tree that is mounted begins at the container's group
    in_groups("0::/../docker/abc\n", {"memory.max": 30 * MB, "memory.current": 40 * MB})
    assert host_info.free_memory_bytes() == 0


def test_without_limits_the_free_memory_is_the_hosts(in_groups):
    in_groups("0::/\n", {"memory.max": "max", "memory.current": 1})
    assert host_info.free_memory_bytes() > 0


def ranks_variables(num_ranks=1):
    return rank_variables(RankEnvironment(0), num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/pod/box\n", {"pod/cpu.max": "250000 100000", "pod/box/cpu.max": "max 100000"}),
        (
            "3:cpu,cpuacct:/box\n0::/\n",
            {
                "cpu/cpu.cfs_quota_us": -1,
                "cpu/cpu.cfs_period_us": 100000,
                "cpu/box/cpu.cfs_quota_us": 125000,
                "cpu/box/cpu.cfs_period_us": 50000,
            },
        ),
    ],
)
def test_a_quota_of_two_and_a_half_cores_is_worth_three_threads(in_groups, monkeypatch, own, files):
    in_groups(own, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert host_info.num_cores() == 3
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [ranks_variables(num_ranks)["OMP_NUM_THREADS"] for num_ranks in (1, 2)] == ["3", "1"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 6})
    assert host_info.num_cores() == 2


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
