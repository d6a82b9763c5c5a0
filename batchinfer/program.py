"""The console command, for a process that does nothing else and ends with it; the command itself is in cli.py."""

import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

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
    _print_everything()
    # before the imports of the command
    spare = SpareRank() if sys.argv[1:2] == ["run"] else None
    tokenizer = TokenizerProcess() if sys.argv[1:2] in (["plan"], ["run"]) else None
    code = ExitCode.OK
    try:
        from batchinfer.cli import main

        main(spare, tokenizer, tell)
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        code = end.code
    except KeyboardInterrupt:  # during the imports: the command itself looks after signals
        print("stopped by SIGINT; run the same command to go on", file=sys.stderr)
        code = ExitCode.INTERRUPTED
    finally:
        if spare is not None:
            spare.end()
        if tokenizer is not None:
            tokenizer.end()
    sys.stdout.flush()
    sys.stderr.flush()
    # taking the interpreter and its libraries apart would take 0.1 s
    os._exit(code)


def _print_everything() -> None:
    """On a console that is not UTF-8, characters that it lacks are no error: a finished run would end with one."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
