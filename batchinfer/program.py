"""The console command, for a process that runs it alone and ends with it; the command itself is in cli.py.

program() does all imports, so that an interrupt during them is reported as a sentence without a traceback.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.records import BatchinferError


def program(on_error: Callable[[BatchinferError], None] | None = None) -> NoReturn:
    """Run the command of this process's arguments and end the process.

    Args:
        on_error: receives errors instead of the person at stderr.
    """
    try:
        code = _command(on_error)
    except KeyboardInterrupt:  # during the imports: the command itself looks after signals
        from batchinfer.records import ExitCode

        print("stopped by SIGINT; run the same command to go on", file=sys.stderr)
        code = ExitCode.INTERRUPTED
    try:
        sys.stdout.flush()
    except OSError:  # reported before
        code = code or 1
    sys.stderr.flush()
    # a regular shutdown of the interpreter and its libraries would take 0.1 s
    os._exit(code)


def _command(on_error: Callable[[BatchinferError], None] | None) -> int:
    """Run the command; return the exit code."""
    import traceback
    from contextlib import suppress

    from batchinfer import own_process
    from batchinfer.records import ExitCode
    from batchinfer.resource_errors import explain_resource_error

    own_process.configure_interpreter()
    _open_closed_streams()
    sys.stdout = own_process.wrap_stream(own_process.Output, sys.stdout)
    sys.stderr = own_process.wrap_stream(own_process.Log, sys.stderr)
    tokenizer = None
    try:
        # before the imports of the command
        if sys.argv[1:2] in (["plan"], ["run"]):
            from batchinfer.data.tokenizer_process import TokenizerProcess

            with suppress(OSError):  # the plan starts it again when needed, and reports the error
                tokenizer = TokenizerProcess()
        from batchinfer.cli import main

        main(tokenizer, on_error)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else ExitCode.INTERNAL if end.code else ExitCode.OK
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 makes a RuntimeError of one in a class body
            raise KeyboardInterrupt from None
        if (explained := explain_resource_error(error)) is not None:  # during the imports
            print(f"error: {explained}", file=sys.stderr)
            return ExitCode.BAD_JOB
        # a regular exit waits for threads, and threads that load ranks may wait for a lost peer
        traceback.print_exc()
        return ExitCode.INTERNAL
    finally:
        from batchinfer.stop_signals import ignore_signals

        ignore_signals()  # how the command ends is decided
        if tokenizer is not None:
            tokenizer.end()
    return ExitCode.OK


def _open_closed_streams() -> None:
    """Open /dev/null for streams that the caller closed (>&-); else files of a run would get their numbers."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
