"""The door for Python: `batchinfer.generate`, `batchinfer.Job`, and `batchinfer.Model`, whose ranks stay loaded.

A job runs as the command does, in a process of its own (process.py, and command.py inside it), since the caller's
process may be anything: a notebook with a running event loop, a thread or a task of Ray's, a script without a guard
around its main part, a program with signal handlers, threads and torch of its own. Nothing of it is forked, imported
again, or changed, and what is written is what `batchinfer run` writes, because it is `batchinfer run`. The price is
half a second to start, which a Model pays once. The process ends with its caller, whatever ends that.
"""

from batchinfer.api.generation import generate
from batchinfer.api.job import Job
from batchinfer.api.model import Model

__all__ = ["Job", "Model", "generate"]
