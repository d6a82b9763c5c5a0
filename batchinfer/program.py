"""The console command, for a process that does nothing else and ends with it; the command itself is in cli.py."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from batchinfer import own_process
from batchinfer.data.tokenizer_process import TokenizerProcess
from batchinfer.launch.rank_process import SpareRank
from batchinfer.records import BatchinferError, ExitCode


def program(tell: Callable[[BatchinferError], None] | None = None) -> NoReturn:
    """Run the command of this process's arguments and end the process.

    Args:
        tell: is told what went wrong, in place of the person at stderr.
    """
    own_process.settle()
    _open_closed_streams()
    sys.stdout = own_process.stream(_Output, sys.stdout)
    sys.stderr = own_process.stream(own_process.Log, sys.stderr)
    # before the imports of the command
    spare = SpareRank() if sys.argv[1:2] == ["run"] else None
    tokenizer = TokenizerProcess() if sys.argv[1:2] in (["plan"], ["run"]) else None
    code = ExitCode.OK
    try:
        from batchinfer.cli import main

        main(spare, tokenizer, tell)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else ExitCode.INTERNAL if end.code else ExitCode.OK
    except KeyboardInterrupt:  # during the imports: the command itself looks after signals
        print("stopped by SIGINT; run the same command to go on", file=sys.stderr)
        code = ExitCode.INTERRUPTED
    except BaseException:
        # the interpreter's own end waits for threads, and those that load ranks may wait for somebody who has left
        traceback.print_exc()
        code = ExitCode.INTERNAL
    finally:
        if spare is not None:
            spare.end()
        if tokenizer is not None:
            tokenizer.end()
    try:
        sys.stdout.flush()
    except OSError:  # of which somebody has been told
        code = code or ExitCode.INTERNAL
    sys.stderr.flush()
    # taking the interpreter and its libraries apart would take 0.1 s
    os._exit(code)


def _open_closed_streams() -> None:
    """Of a caller who closed some of the three (>&-) they lead nowhere; else files of a run would get their numbers."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


class _Output(own_process.WaitingFile):
    """stdout: says where it was that something could not be written, on a full disk behind `> FILE`."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None
