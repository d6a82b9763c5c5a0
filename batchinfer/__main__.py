"""`python -m batchinfer`: the same as the command `batchinfer`."""

from batchinfer.cli import program

program()
