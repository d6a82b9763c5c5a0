"""Submission of a planned run to a cluster: Slurm, Kubernetes or Ray.

In: a run folder and a number of tasks. Out: tasks in a cluster, each a group of nodes that claims work units until none
is left, and a record of the submission in the run folder.
"""
