"""`batchinfer` as the child of a Ray actor: it commits and leaves when the actor is gone, whatever has ended that."""

import ctypes
import os
import signal
import sys

from batchinfer.records import ExitCode

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Arguments: the actor's process id, then those of `batchinfer`, which this process becomes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # stays with the process
    if os.getppid() != int(sys.argv[1]):  # it was gone before
        sys.exit(ExitCode.INTERRUPTED)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "batchinfer", *sys.argv[2:]])


if __name__ == "__main__":
    main()
