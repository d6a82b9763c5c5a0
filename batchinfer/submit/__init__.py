"""A planned run on a cluster: Slurm, Kubernetes and Ray.

Comes in: a run folder and how many tasks. Goes out: tasks in a cluster, each a group of nodes that claims work units
until none is left, and a record of them in the run folder.
"""
