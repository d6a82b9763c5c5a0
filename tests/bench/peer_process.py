"""Engines as processes of their own: started at their quickest, asked, and watched as they grow."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.jobs import Ended

BENCH = Path(__file__).parent
ENVIRONMENT = BENCH.parents[1] / ".venv-peers"
OPENVINO = BENCH.parents[1] / ".venv-openvino"  # whose torch and transformers are others
VLLM = ("vllm", "vllm-float32", "vllm-int8", "vllm-eager", "vllm-mla")
PEERS = (*VLLM, "transformers", "llama.cpp", "llama.cpp-q8", "openvino")
OPENVINO_COMMAND = [str(OPENVINO / "bin" / "python"), str(BENCH / "peer_openvino.py")]
GGUF_KINDS = {"llama.cpp": "BF16", "llama.cpp-q8": "Q8_0"}
NUM_SEQUENCES, OTHER_SEQUENCES = {"tiny": 256, "sample": 256}, 64  # in one step of vLLM's or llama.cpp's
LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib")


class PeerProcess:
    """A peer_*.py, from its start until it is closed; it waits without work between two questions."""

    def __init__(self, name: str, size: str, model: Path) -> None:
        self.num_runs = 0
        self._log = ENVIRONMENT / f"{name}-{size}.log"
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command_of(name, size, model),
            env={**os.environ, **quickest_environment(name, size)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
        )
        self.versions: str = self._answer()["versions"]

    def run(self, job: Path) -> tuple[float, float]:
        """(seconds of the workload, seconds since the process was started)."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{job}\n")
        self._process.stdin.flush()
        self.num_runs += 1
        return float(self._answer()["wall_s"]), time.monotonic() - self._started

    def peak_bytes(self) -> int:
        return peak_bytes(self._process.pid)

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._log.read_text()[-3000:]}\nA peer ended early; all it wrote: {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class FreshPeer:
    """A peer restarted for every run, and once before, so that no run is the first to read its files."""

    def __init__(self, name: str, size: str, model: Path) -> None:
        self._which = name, size, model
        self._peak_bytes = 0
        with contextlib.closing(PeerProcess(*self._which)) as peer:
            self.versions = peer.versions

    def run(self, job: Path) -> tuple[float, float]:
        """Run as `PeerProcess.run` does, in a new process."""
        with contextlib.closing(PeerProcess(*self._which)) as peer:
            times = peer.run(job)
            self._peak_bytes = max(self._peak_bytes, peer.peak_bytes())
        return times

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def close(self) -> None:
        """Do nothing: no process runs between two runs."""


class OwnProcess:
    """Runs batchinfer's command as a child process; records the peak memory of the largest."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def __call__(self, *arguments: str | Path) -> Ended:
        command = [sys.executable, "-c", "from batchinfer.program import program; program()", *map(str, arguments)]
        with tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err)
            while process.poll() is None:
                self.peak_bytes = max(self.peak_bytes, peak_bytes(process.pid))
                # peaks stay known while a process lives, and looking for processes more often would slow them down
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.4)
            err.seek(0)
            return Ended(process.returncode, "", err.read())


def command_of(name: str, size: str, model: Path) -> list[str]:
    """Return the command of a peer. transformers runs in batchinfer's environment: vLLM holds back its version."""
    if name == "transformers":
        return [sys.executable, str(BENCH / "peer_transformers.py"), str(model)]
    python, num_sequences = str(ENVIRONMENT / "bin" / "python"), str(NUM_SEQUENCES.get(size, OTHER_SEQUENCES))
    if name in GGUF_KINDS:
        return [python, str(BENCH / "peer_llama.py"), str(gguf_of(name, model)), num_sequences]
    if name == "openvino":
        return [*OPENVINO_COMMAND, "serve", str(openvino_of(model)), num_sequences]
    vllm = [python, str(BENCH / "peer_vllm.py"), str(model), num_sequences]
    return vllm if name in ("vllm", "vllm-int8") else [*vllm, name.replace("vllm-", "--")]


def gguf_of(name: str, model: Path) -> Path:
    """The file that `write_gguf` makes of a checkpoint for this peer."""
    return model / f"model-{GGUF_KINDS[name]}.gguf"


def write_gguf(name: str, model: Path) -> None:
    """Convert a checkpoint for llama.cpp."""
    if not (ENVIRONMENT / ".installed-llama").exists():
        sys.exit("llama.cpp is missing: `make bench-llama` builds it")
    command = [ENVIRONMENT / "bin" / "python", BENCH / "gguf_model.py", model, gguf_of(name, model), GGUF_KINDS[name]]
    subprocess.run(command, check=True)


def openvino_of(model: Path) -> Path:
    """The folder that `write_openvino` makes of a checkpoint."""
    return model.with_name(f"{model.name}-openvino")


def write_openvino(model: Path) -> None:
    """Convert a checkpoint for OpenVINO."""
    if not (OPENVINO / ".installed").exists():
        sys.exit("OpenVINO is missing: `make bench-openvino` installs it")
    subprocess.run([*OPENVINO_COMMAND, "convert", str(model), str(openvino_of(model))], check=True)


def quickest_environment(name: str, size: str) -> dict[str, str]:
    """Allocator and thread library that peers are quickest with, worth a factor of two or three; vLLM's cache."""
    if name == "openvino":  # it brings its own
        return {}
    threads = ENVIRONMENT / "lib" / "libiomp5.so"
    if not threads.exists():
        sys.exit(f"{threads} is missing: `make bench-peers` installs the peers")
    found = [file for folder in LIBRARIES for file in Path(folder).glob("**/libtcmalloc_minimal.so.4")]
    if not found:
        sys.exit("libtcmalloc_minimal.so.4 is missing, peers are slow without: apt-get install libtcmalloc-minimal4")
    return {"LD_PRELOAD": f"{found[0]}:{threads}", "VLLM_CACHE_ROOT": str(compiled_folder(name, size))}


def compiled_folder(name: str, size: str) -> Path:
    """Return the folder where vLLM caches compiled code for a model at a path."""
    return ENVIRONMENT / "compiled" / f"{name}-{size}"


def peak_bytes(pid: int) -> int:
    """Peak memory of the largest of a process and those below it."""
    return max(map(_peak_of_one, with_descendants(pid)))


def _peak_of_one(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def with_descendants(pid: int) -> Iterator[int]:
    """A process, its children and theirs."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            yield from with_descendants(int(child))
