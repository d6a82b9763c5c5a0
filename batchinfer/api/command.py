"""The process that runs commands for a caller in Python: `python -m batchinfer.api.command EVENTS LOG [run JOB]`.

EVENTS is the number of an inherited pipe for JSON lines: {"progress": [title, done, total]} and
{"error": {"classes": …, "message": …, "attributes": …}}. Standard input is a pipe, too. If it closes, or the parent
process ends, the caller has ended, and the command stops as by SIGTERM.

Without a command, the process runs one job after the other, with ranks and tokenizer that stay loaded. Each line of
standard input is "shown" or "quiet" and the path of a job file, and {"ended": exit code} is written after each job. The
messages of a quiet job go to LOG, an inherited file's number. The line "stop" stops the job as by SIGTERM.
"""

import json
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from batchinfer import own_process, progress
from batchinfer.data.tokenizer_process import TokenizerProcess
from batchinfer.launch.kept_ranks import KeptRanks
from batchinfer.program import program
from batchinfer.records import BatchinferError, ExitCode
from batchinfer.stop_signals import SIGNALS, ignore_signals

STOP = b"stop"
LOOK_S = 1.0  # between checks that the parent process lives
AGAIN_S = 0.2  # between signals, because a signal may come before the command handles signals

Tell = Callable[[BatchinferError], None]


def main() -> None:
    """Run the command in this process's arguments, else the jobs on standard input; then end the process."""
    events, log = int(sys.argv.pop(1)), int(sys.argv.pop(1))
    os.set_inheritable(events, False)
    os.set_inheritable(log, False)
    os.set_blocking(events, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the thread that started this process may block them
    jobs: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs, os.getppid()), daemon=True).start()

    def tell_progress(title: str, done: int, total: int) -> None:
        # progress is dropped if the caller does not read now, or has ended
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(events, _line({"progress": [title, done, total]}))

    def tell(event: dict[str, object]) -> None:
        os.set_blocking(events, True)
        with suppress(BrokenPipeError):  # the caller has ended
            os.write(events, _line(event))
        os.set_blocking(events, False)

    def tell_error(error: BatchinferError) -> None:
        tell(
            {
                "error": {
                    "classes": [kind.__name__ for kind in type(error).__mro__],
                    "message": str(error),
                    "attributes": {name: str(value) for name, value in vars(error).items()},
                }
            }
        )

    progress.add_listener(tell_progress)
    if len(sys.argv) > 1:
        program(tell_error)
    _run_all(jobs, log, tell_error, lambda code: tell({"ended": code}))


def _run_all(jobs: "queue.SimpleQueue[bytes | None]", log: int, tell: Tell, ended: Callable[[int], None]) -> NoReturn:
    """Run one job after the other until the queue gives None."""
    ignore_signals()  # the caller's, between jobs
    own_process.configure_interpreter()
    kept, tokenizer = KeptRanks(), TokenizerProcess(stays=True)
    from batchinfer import cli

    terminal = os.dup(2)
    while (line := jobs.get()) is not None:
        where, _, job = line.partition(b" ")
        os.dup2(log if where == b"quiet" else terminal, 2)
        sys.argv[1:] = ["run", os.fsdecode(job)]
        code: int | str | None = ExitCode.OK
        try:
            cli.main(tokenizer, tell, kept)
        except SystemExit as end:
            code = end.code
        ignore_signals()
        ended(code if isinstance(code, int) else ExitCode.INTERNAL)
    kept.end()
    tokenizer.end()
    os._exit(ExitCode.OK)


def _line(event: dict[str, object]) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _listen(jobs: "queue.SimpleQueue[bytes | None]", starter: int) -> None:
    """Put the lines of standard input into the queue until the caller ends; then stop the running job."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    rest = b""
    while os.getppid() == starter:
        if not poll.poll(LOOK_S * 1000):
            continue
        received = os.read(0, 1 << 16)
        if not received:
            break
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if line == STOP:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                jobs.put(line)
    jobs.put(None)
    while True:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(AGAIN_S)


if __name__ == "__main__":
    main()
