"""`batchinfer` as the child of a Ray actor: it commits and leaves when the actor is gone, whatever has ended that."""

import os
import signal
import sys

from batchinfer import own_process
from batchinfer.records import ExitCode


def main() -> None:
    """Arguments: the actor's process id, then those of `batchinfer`, which this process becomes."""
    own_process.end_with_parent(signal.SIGTERM)  # stays with the process
    if os.getppid() != int(sys.argv[1]):  # it was gone before
        sys.exit(ExitCode.INTERRUPTED)
    command = own_process.command("batchinfer", *sys.argv[2:])
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
