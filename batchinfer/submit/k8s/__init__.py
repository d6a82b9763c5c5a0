"""A run on Kubernetes: an Indexed Job of tasks, or a JobSet for each task of several nodes, and a Job that finishes.

Manifests are the templates of jobs/k8s with what is different for each run put in; kubectl carries them over.
"""
