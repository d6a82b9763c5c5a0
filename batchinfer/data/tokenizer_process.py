"""The tokenizer process, which loads a model's tokenizer and template and forks workers: start, restart and end.

Tokenizer, template and prompts come from outside. They may make a library crash or hang, so they are never used in the
process of a command. The code of the tokenizer process is data/tokenizer_worker.py.
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

TOGETHER = b"together"  # one answer for a batch: fast
ONE_BY_ONE = b"one by one"  # an answer for each row: rows before a bad one are kept, and the bad row is known
PROMPT, CHOICE = "prompt", "choice"  # kinds of texts in a batch; choices follow a prompt, so they get no special tokens
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
    """The end of a process.

    code: the exit code, or minus the number of the signal that ended the process.
    words: the last line that the process wrote to stderr, "" if there is none.
    """

    code: int
    words: str

    @property
    def by_time(self) -> bool:
        """Whether the process used up its processor time."""
        return self.code == -signal.SIGXCPU

    @property
    def by_memory(self) -> bool:
        """Whether the process reached its memory limit."""
        signs = ("MemoryError", "memory allocation of", "bad_alloc")  # of Python, Rust and C++
        return any(sign in self.words for sign in signs)

    @property
    def from_outside(self) -> bool:
        """Whether the process was killed from outside, for example by the kernel for lack of memory on the host."""
        return self.code in {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP}

    def reason(self) -> str:
        """Return the reason of the end in words."""
        if self.code >= 0:
            return self.words or f"exit code {self.code}"
        return ": ".join(filter(None, [signal.Signals(-self.code).name, self.words]))


class Worker:
    """A worker forked from the tokenizer process, with its channel for bytes; the user of a worker closes it.

    start: number of the start of the tokenizer process that forked the worker.
    """

    def __init__(self, pid: int, channel: socket.socket, stderr: int, start: int) -> None:
        self.pid, self.start = pid, start
        self.channel = Connection(channel.detach())
        self.stderr = stderr

    def close(self) -> None:
        """Close the channel, which ends the worker."""
        self.channel.close()
        os.close(self.stderr)


class TokenizerProcess:
    """The tokenizer process, started at once because its imports take time, until `end`.

    A process that was killed from outside is started again, MOST_STARTS times in all.

    Args:
        stays: whether the process serves several jobs.
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
        """Load the model folder `settings["folder"]`; a process that stays keeps an unchanged folder loaded.

        Returns:
            The properties of tokenizer and template (see data/tokenizer_worker.py).

        Raises:
            ModelError: the tokenizer or the template is missing or not valid, or loading it does not end well.
            BatchinferError: the process was killed from outside again and again.
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
            ended, folder = self._ended(), settings["folder"]
            if not ended.from_outside:
                raise ModelError(f"cannot use the tokenizer and template of {folder}: {_why(ended)}; restore the files")
            if self._num_starts == MOST_STARTS:
                raise BatchinferError(
                    f"the process that loads the tokenizer of {folder} was ended by {ended.reason()}, "
                    f"{self._num_starts} times in all, perhaps for lack of memory; run the same command to go on"
                )
            self._start()
            answer = self._send_settings()
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise ModelError(found["error"])
        self._loaded = found
        return found

    def fork(self) -> Worker:
        """Fork a worker from the loaded tokenizer process.

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
        """Return how a worker ended after its channel closed.

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
        """End the process after the job's last text, unless it stays for the next job."""
        if not self._stays:
            self.end()

    def end(self) -> None:
        """Kill the process and its workers; threads that wait for a worker get an error. Further calls do nothing."""
        self._loaded = None
        self._has_ended = True
        self._kill()
        while not self._lock.acquire(timeout=LOOK_S):
            self._kill()  # a process that another thread was starting
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
        """Start the process again and load the same settings; raise if this program ended the process."""
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
        """Send the settings in a file, because they may be longer than a message."""
        with tempfile.TemporaryFile() as file:
            file.write(self._settings)
            file.seek(0)
            return self._exchange(b"load", [file.fileno()])

    def _exchange(self, question: bytes, descriptors: list[int] | None = None) -> bytes:
        """Send a message and return the answer, b"" if the process has ended."""
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
    """Start the tokenizer process with its control channel (a descriptor) and a file for its stderr."""
    command = own_process.command("batchinfer.data.tokenizer_worker", str(control))
    environment = {**os.environ, **ENVIRONMENT}
    # in a separate session, because Ctrl-C is for the command, which ends this process when it stops
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
