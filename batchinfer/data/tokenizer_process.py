"""The process that loads a model's tokenizer and template and forks workers from itself: its start and its losses.

Tokenizer, template and prompts are other people's. A library may end its process over them, or never come back, so none
of it happens in the process of a command. What runs inside: data/tokenizer_worker.py.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from batchinfer import own_process
from batchinfer.data.folder_state import FolderState, folder_state
from batchinfer.records import BatchinferError, ModelError
from batchinfer.sanitize import clip

TOGETHER = b"together"  # a batch in one go: quick
ONE_BY_ONE = b"one by one"  # an answer for each row: those before a bad one are not lost, and its place is known
PROMPT, CHOICE = "prompt", "choice"  # what a batch's texts are: what follows a prompt has no beginning of its own
MOST_STARTS = 4
LOOK_S = 0.05  # while another thread may be starting the process that is to end
WORDS_BYTES = 4096  # of what a process wrote last

# One thread each: there is a worker for every core. Arrow's own allocator would reserve memory that is never used.
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "RUST_BACKTRACE": "0",
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended.

    code: its exit code, or minus the signal that ended it.
    words: the last line that it wrote to stderr, "" for none.
    """

    code: int
    words: str

    @property
    def by_time(self) -> bool:
        """It used up its processor time."""
        return self.code == -signal.SIGXCPU

    @property
    def by_memory(self) -> bool:
        """It asked for more memory than it may have."""
        signs = ("MemoryError", "memory allocation of", "bad_alloc")  # of Python, Rust and C++
        return any(sign in self.words for sign in signs)

    @property
    def from_outside(self) -> bool:
        """Somebody ended it: the kernel for want of memory on this host, say."""
        return self.code in {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP}

    def reason(self) -> str:
        """The end as words for a person."""
        if self.code >= 0:
            return self.words or f"exit code {self.code}"
        return ": ".join(filter(None, [signal.Signals(-self.code).name, self.words]))


class Worker:
    """One fork: its channel for bytes; whoever has one closes it.

    start: which start of the process it was forked from.
    """

    def __init__(self, pid: int, channel: socket.socket, stderr: int, start: int) -> None:
        self.pid, self.start = pid, start
        self.channel = Connection(channel.detach())
        self.stderr = stderr

    def close(self) -> None:
        """Let it go: without its channel the process ends."""
        self.channel.close()
        os.close(self.stderr)


class TokenizerProcess:
    """The process from its start, which is early since its imports take their time, to `end`.

    Where somebody else ends it, it is started again, MOST_STARTS times in all.

    Args:
        stays: it is for several jobs.
    """

    def __init__(self, *, stays: bool = False) -> None:
        self._lock = threading.Lock()
        self._stays = stays
        self._settings = b""
        self._of: FolderState = frozenset()
        self._loaded: dict[str, Any] | None = None
        self._num_starts = 0
        self._has_ended = False
        self._start()

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Load the model folder `settings["folder"]`; once, unless it stays.

        Returns:
            What data/tokenizer_worker.py says of it.

        Raises:
            ModelError: the tokenizer or the template is missing or not valid, or loading it does not end well.
        """
        wanted, files = json.dumps(settings).encode(), folder_state(Path(settings["folder"]))
        if self._loaded is not None and (self._settings, self._of) == (wanted, files):
            return self._loaded
        if self._settings:
            self.end()
            self._num_starts, self._has_ended = 0, False
            self._start()
        self._settings, self._of = wanted, files
        answer = self._send_settings()
        while not answer:
            ended = self._ended()
            if not ended.from_outside or self._num_starts == MOST_STARTS:
                folder, why = settings["folder"], _why(ended)
                raise ModelError(f"cannot use the tokenizer and template of {folder}: {why}; restore the files")
            self._start()
            answer = self._send_settings()
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise ModelError(found["error"])
        self._loaded = found
        return found

    def fork(self) -> Worker:
        """A worker, in the state that the process had after loading.

        Raises:
            BatchinferError: the process ends again and again.
        """
        ours, theirs = socket.socketpair()
        stderr = _unnamed_file()
        with theirs, self._lock:
            while not (pid := self._exchange(b"fork", [theirs.fileno(), stderr])):
                self._start_again()
            return Worker(int(pid), ours, stderr, self._num_starts)

    def ended(self, worker: Worker) -> Ended:
        """How a worker ended whose channel has closed.

        Raises:
            BatchinferError: the process ends again and again.
        """
        with self._lock:
            if worker.start == self._num_starts:
                status = self._exchange(b"%d" % worker.pid)
                if status:
                    return Ended(os.waitstatus_to_exitcode(int(status)), _last_line(worker.stderr))
                self._start_again()
        return Ended(-signal.SIGKILL, "")  # with the process that it was forked from

    def let_go(self) -> None:
        """The job has no more texts: end the process unless it stays for another one."""
        if not self._stays:
            self.end()

    def end(self) -> None:
        """End it and its workers, whatever they do; again: nothing happens. Threads that want a worker get an error."""
        self._loaded = None
        self._has_ended = True
        self._kill()
        while not self._lock.acquire(timeout=LOOK_S):
            self._kill()  # one that another thread was starting
        self._kill()
        self._control.close()
        self._stderr.close()
        self._lock.release()

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self._num_starts += 1
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_process(theirs.fileno(), self._stderr.fileno())

    def _start_again(self) -> None:
        """With what it had loaded, unless this program has ended it."""
        if self._has_ended:
            raise BatchinferError("the tokenizer's process has ended with its job")
        ended = self._ended()
        while ended.from_outside and self._num_starts < MOST_STARTS and not self._has_ended:
            self._start()
            if self._send_settings():
                return
            ended = self._ended()
        raise BatchinferError(f"the tokenizer's process ended: {_why(ended)}; run the same command to go on")

    def _send_settings(self) -> bytes:
        """In a file: a job's texts may be longer than a message."""
        with tempfile.TemporaryFile() as file:
            file.write(self._settings)
            file.seek(0)
            return self._exchange(b"load", [file.fileno()])

    def _exchange(self, question: bytes, descriptors: list[int] | None = None) -> bytes:
        """Its answer; nothing: it has ended."""
        if self._has_ended:
            return b""
        try:
            socket.send_fds(self._control, [question], descriptors or [])
            return self._control.recv(1 << 16)
        except ConnectionError:
            return b""

    def _ended(self) -> Ended:
        self._control.close()
        ended = Ended(self._process.wait(), _last_line(self._stderr.fileno()))
        self._stderr.close()
        return ended


def _why(ended: Ended) -> str:
    if ended.by_time:
        return "it takes too much processor time"
    return "it takes too much memory" if ended.by_memory else ended.reason()


def start_process(control: int, stderr: int) -> subprocess.Popen[bytes]:
    """Start it with its control channel (a descriptor) and a file for what it writes to stderr."""
    command = own_process.command("batchinfer.data.tokenizer_worker", str(control))
    environment = {**os.environ, **ENVIRONMENT}
    # a session of its own: Ctrl-C is for the command, which ends this process when it stops
    return subprocess.Popen(
        command,
        env=environment,
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
        stdout=stderr,
        stderr=stderr,
        start_new_session=True,
    )


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _last_line(file: int) -> str:
    size = os.fstat(file).st_size
    text = os.pread(file, WORDS_BYTES, max(0, size - WORDS_BYTES)).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return clip(lines[-1]) if lines else ""
