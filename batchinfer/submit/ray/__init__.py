"""A run on a Ray cluster: one Ray job, whose driver starts the tasks and finishes the run when they have ended.

A task is a placement group with one actor per node, which runs `batchinfer work` as a process of its own. Ray is no
dependency: whoever submits to it has it.
"""
