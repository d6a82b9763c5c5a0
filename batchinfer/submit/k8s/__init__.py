"""A run on Kubernetes: an Indexed Job of tasks, or a JobSet per task of several nodes, and a Job that finishes the run.

Manifests are the templates of jobs/k8s, filled in for each run; kubectl creates the objects.
"""
