"""The console command, for a process that does nothing else and ends with it; the command itself is in cli.py."""

import gc
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from batchinfer.data.tokenizer_process import TokenizerProcess
from batchinfer.launch.rank_process import SpareRank
from batchinfer.records import BatchinferError, ExitCode


def program(tell: Callable[[BatchinferError], None] | None = None) -> NoReturn:
    """Run the command of this process's arguments and end the process.

    Args:
        tell: is told what went wrong, in place of the person at stderr.
    """
    # a command makes many small things that stay until its end: looking through them all the time finds little
    gc.set_threshold(50_000, 20, 20)
    # nothing here multiplies with numpy, whose threads would be busy waiting for work while others start
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
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
