"""A run on a Slurm cluster: submitted, watched, cancelled, resized by the time of day."""
