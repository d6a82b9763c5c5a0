"""A lone rank started before its job is known: its imports take longer than all that the command does until then."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import suppress

from batchinfer.launch.rank_process import PREFIX, SPARE, RankEnvironment, rank_variables, start_rank


class SpareRank:
    """A process that waits for its task. Whoever makes one calls `end` at last."""

    def __init__(self) -> None:
        self._variables = rank_variables(RankEnvironment(0, "", 0, ""), num_ranks=1, one_host=True)
        self._process: subprocess.Popen[bytes] | None = None  # None: taken, ended, or never started
        self.started_s = time.time()
        with suppress(OSError):  # too many processes, say; the rank is started when it is needed, and then this is told
            self._process = start_rank({**self._variables, SPARE: "1"}, subprocess.PIPE)

    def take(self, variables: dict[str, str]) -> subprocess.Popen[bytes] | None:
        """Hand the process over with its task; ends it if it was started with other settings than are wanted now."""
        process = self._process
        if process is None or _settings(self._variables) != _settings(variables):
            self.end()
            return None
        self._process = None
        assert process.stdin is not None
        task = {name: value for name, value in variables.items() if name.startswith(PREFIX)}
        try:
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.close()
        except BrokenPipeError:  # somebody has killed it
            process.wait()
            return None
        return process

    def end(self) -> None:
        """End the process unless somebody took it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _settings(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith(PREFIX)}
