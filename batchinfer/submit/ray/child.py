"""`batchinfer` as the child of a Ray actor: the child gets SIGTERM when the actor dies, for whatever reason."""

import os
import signal
import sys

from batchinfer import own_process
from batchinfer.records import ExitCode


def main() -> None:
    """Become `batchinfer`. Arguments: the actor's process id, then the arguments of `batchinfer`."""
    own_process.end_with_parent(signal.SIGTERM)  # this setting survives execv
    if os.getppid() != int(sys.argv[1]):  # the actor died before that
        sys.exit(ExitCode.INTERRUPTED)
    command = own_process.command("batchinfer", *sys.argv[2:])
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
