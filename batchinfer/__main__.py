"""`python -m batchinfer`, the same as the command `batchinfer`."""

from batchinfer.program import program

program()
