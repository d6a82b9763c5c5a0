"""A run on Slurm: one array of tasks that share the units, and a job behind it that finishes the run."""
