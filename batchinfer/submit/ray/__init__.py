"""A run on a Ray cluster: one Ray job, whose driver starts the tasks and finishes the run when they have ended.

A task is a placement group with one actor per node, which runs `batchinfer work` as a child process. Ray is no
dependency of batchinfer: users of Ray have installed it.
"""
