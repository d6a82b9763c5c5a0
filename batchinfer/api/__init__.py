"""The Python interface: `batchinfer.generate`, `batchinfer.Job`, and `batchinfer.Model`, whose ranks stay loaded.

A job runs in a separate process, as the command does (process.py starts the process, command.py runs in it). The
caller's process may be anything: a notebook with a running event loop, a thread or a task of Ray, a script without a
main guard, a program with signal handlers, threads and torch. So the caller is not forked, imported again or changed.
The files are those of `batchinfer run`, because the process is `batchinfer run`. The start costs half a second, which a
Model pays once. The process ends with its caller, however the caller ends.
"""

from batchinfer.api.generation import generate
from batchinfer.api.job import Job
from batchinfer.api.model import Model

__all__ = ["Job", "Model", "generate"]
