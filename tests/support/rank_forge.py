"""Ranks forked from a server that has imported their program once, for commands that run in the tests' own process.

Importing torch takes a rank longer than most jobs of these tests. Forked ranks run the same program with the same
variables; those of commands that are processes of their own (`jobs.start`) are started as they are for users.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from batchinfer.launch import rank_process
from batchinfer.rank import main
from batchinfer.rank.rank_task import read_task

# Read by a rank when it runs, not while modules are imported. Any other variable may have been.
READ_LATE = ("BATCHINFER_RANK_", "PYTEST_", "TRAP_", "GLOO_", "AWS_", "SLURM_", "PATH", "GLIBC_TUNABLES")
TRAP = "sitecustomize.py"  # what a test sets up in ranks
_start_rank = rank_process.start_rank
_environment: dict[str, str] = {}  # of the server


def open_forge() -> None:
    """Start the server, in the environment of now."""
    _environment.update(_early(os.environ))
    fork_server()
    forkserver.ensure_running()


def fork_server() -> ForkServerContext:
    """What processes of tests are forked with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["batchinfer.rank.main"])
    return context


class ForkedRank:
    """A rank's process, with what the rank watcher uses of subprocess.Popen."""

    def __init__(self, variables: dict[str, str], end: socket.socket | None, trap: Path | None) -> None:
        self._process = fork_server().Process(target=_run, args=(variables, end, os.getcwd(), trap), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int | None:
        self._process.join()
        return self.returncode


def start_rank(variables: dict[str, str], end: socket.socket | None) -> ForkedRank | subprocess.Popen[bytes]:
    """As rank_process.start_rank; forked unless what is imported might be another thing with these variables."""
    early = _early(variables)
    folder, _, others = early.pop("PYTHONPATH", "").partition(os.pathsep)
    trap = Path(folder, TRAP) if folder and list(Path(folder).glob("*")) == [Path(folder, TRAP)] else None
    path = others if trap else variables.get("PYTHONPATH")
    early |= {"PYTHONPATH": path} if path else {}
    return ForkedRank(variables, end, trap) if early == _environment else _start_rank(variables, end)


def _early(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith(READ_LATE)}


def _run(variables: dict[str, str], end: socket.socket | None, folder: str, trap: Path | None) -> None:
    os.environ.clear()
    os.environ.update(variables)
    if end is not None:
        os.environ["BATCHINFER_RANK_SOCKET"] = str(end.detach())
    os.chdir(folder)
    os.dup2(2, 1)
    if trap is not None:
        runpy.run_path(str(trap))
    main.main(read_task())
