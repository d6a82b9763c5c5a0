"""Compilers as child processes: side by side, with a time limit, never outliving the process that started them.

A compiler starts child processes, which do the work and would survive the compiler or the waiting process. So each
compiler has a leader process above it. The leader kills the whole group as soon as its pipe is closed, on purpose or
because the other end died.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from batchinfer_kernels.cpu.instructions import BuildError

_LEADER = """
import os, signal, subprocess, sys, threading
def end_with_pipe():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_pipe, daemon=True).start()
try:
    code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
except OSError as error:
    sys.exit(f"it cannot be run: {error.strerror}")
sys.exit(code if code >= 0 else 128 - code)
"""


def run(commands: list[list[str]], limit_s: float, scratch: Path) -> None:
    """Run the commands side by side until all end.

    Args:
        limit_s: seconds for all commands together.
        scratch: folder for temporary files; killed commands leave some behind.

    Raises:
        BuildError: a command failed or took too long; the message ends with its first error line.
    """
    deadline = time.monotonic() + limit_s
    other_end, pipe = os.pipe()
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-I", "-S", "-c", _LEADER, *command],
                    env={**os.environ, "TMPDIR": str(scratch)},
                    stdin=other_end,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    process_group=0,
                )
            )
        for process, command in zip(processes, commands, strict=True):
            _, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            if process.returncode:
                lines = [line.strip() for line in errors.splitlines() if line.strip()]
                first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")
                raise BuildError(f"{command[0]} failed with code {process.returncode}: {first}")
    except subprocess.TimeoutExpired:
        raise BuildError(f"{commands[0][0]} took longer than {limit_s:.0f} s") from None
    except OSError as error:
        raise BuildError(f"{commands[0][0]} cannot be run: {error.strerror}") from error
    finally:
        os.close(other_end)
        os.close(pipe)
        for process in processes:
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
