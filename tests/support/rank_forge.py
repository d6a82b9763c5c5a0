"""Ranks and tokenizer processes forked from a server that has imported their programs once.

They are for commands that run in the tests' own process: importing torch takes a rank longer than most jobs of these
tests. Forked ones run the same program with the same variables; those of commands that are processes of their own
(`jobs.start`) are started as they are for users.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from batchinfer.data import tokenizer_process, tokenizer_worker
from batchinfer.launch import local_ranks
from batchinfer.launch.rank_forks import ForkedRank
from batchinfer.launch.rank_process import RankStart
from batchinfer.rank import main

# Read by a rank when it runs, not while modules are imported. Any other variable may have been.
READ_LATE = (
    *("BATCHINFER_RANK_", "PYTEST_", "TRAP_", "GLOO_", "AWS_", "SLURM_", "PATH", "GLIBC_TUNABLES"),
    *("TORCHINDUCTOR_", "TOKENIZERS_PARALLELISM"),  # which transformers and datasets set when they are used
)
TESTS = Path(__file__).parents[1]
WARM = "support.warm_tokenizer"
TRAP = "sitecustomize.py"  # what a test sets up in ranks
_start_ranks = local_ranks.start_ranks
_variables: dict[str, str] = {}  # of the server
_environment: dict[str, str] = {}  # those of them that what is imported may depend on
_context: list[ForkServerContext] = []  # the server, once a test has asked for it


def open_forge() -> None:
    """The server will have the environment of now; it starts with the first process: many tests need none."""
    _variables.update(os.environ)
    _environment.update(_early(os.environ))


def fork_server() -> ForkServerContext:
    """Return the context with which processes of tests are forked."""
    if not _context:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["batchinfer.rank.main", __name__, WARM])
        with pytest.MonkeyPatch.context() as patch, contextlib.chdir(TESTS.parent):
            for name in {*os.environ, *_variables} if _variables else ():
                patch.setenv(name, _variables[name]) if name in _variables else patch.delenv(name)
            # it passes over modules that it does not find
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])))
            forkserver.ensure_running()
        _context.append(context)
    return _context[0]


class Forked:
    """A process with what the program uses of subprocess.Popen."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._process = fork_server().Process(target=target, args=arguments, daemon=True)
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


def start_tokenizer(control: int, stderr: int) -> Forked:
    """Fork as tokenizer_process.start_process starts."""
    return Forked(_run_tokenizer, socket.socket(fileno=os.dup(control)), Connection(os.dup(stderr)))


def start_ranks(starts: list[RankStart]) -> dict[int, Forked | ForkedRank | subprocess.Popen[bytes]]:
    """Start as local_ranks.start_ranks does; fork from the server unless these variables could change the imports."""
    early = _early(starts[0].variables)
    folder, _, others = early.pop("PYTHONPATH", "").partition(os.pathsep)
    trap = Path(folder, TRAP) if folder and list(Path(folder).glob("*")) == [Path(folder, TRAP)] else None
    path = others if trap else starts[0].variables.get("PYTHONPATH")
    early |= {"PYTHONPATH": path} if path else {}
    if early != _environment:
        return dict(_start_ranks(starts))
    return {start.rank: Forked(_run, start.variables, start.end, os.getcwd(), trap) for start in starts}


def _early(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith(READ_LATE)}


def _run_tokenizer(control: socket.socket, stderr: Connection) -> None:
    assert WARM in sys.modules
    os.environ.update(tokenizer_process.ENVIRONMENT)
    os.dup2(stderr.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    tokenizer_worker.serve(control)


def _run(variables: dict[str, str], end: socket.socket | None, folder: str, trap: Path | None) -> None:
    os.environ.clear()
    os.environ.update(variables)
    if end is not None:
        os.environ["BATCHINFER_RANK_SOCKET"] = str(end.detach())
    os.chdir(folder)
    os.dup2(2, 1)
    if trap is not None:
        runpy.run_path(str(trap))
    main.main()
