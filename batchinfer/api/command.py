"""A command in a process of its own, for a caller in Python: `python -m batchinfer.api.command EVENTS run JOB`.

EVENTS is the number of an inherited pipe, into which go JSON lines: {"progress": [title, done, total]} and
{"error": {"classes": …, "message": …, "attributes": …}}. Standard input is a pipe, too: when it closes, the caller has
ended, and the command stops as by SIGTERM.
"""

import json
import os
import signal
import sys
import threading
from contextlib import suppress

from batchinfer import progress
from batchinfer.program import program
from batchinfer.records import BatchinferError
from batchinfer.stop import SIGNALS


def main() -> None:
    """Run the command of this process's arguments and end the process."""
    events = int(sys.argv.pop(1))
    os.set_inheritable(events, False)
    os.set_blocking(events, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the thread that started this process may block them
    threading.Thread(target=_end_with_caller, daemon=True).start()

    def tell_progress(title: str, done: int, total: int) -> None:
        # a caller that does not read now misses it; one that has ended needs none
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(events, _line({"progress": [title, done, total]}))

    def tell_error(error: BatchinferError) -> None:
        os.set_blocking(events, True)
        told = {
            "classes": [kind.__name__ for kind in type(error).__mro__],
            "message": str(error),
            "attributes": {name: str(value) for name, value in vars(error).items()},
        }
        with suppress(BrokenPipeError):  # nobody is there who could be told
            os.write(events, _line({"error": told}))

    progress.listen(tell_progress)
    program(tell_error)


def _line(event: dict[str, object]) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _end_with_caller() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
