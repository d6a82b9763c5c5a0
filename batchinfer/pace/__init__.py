"""Control of the number of a run's Slurm tasks over time: by a schedule, or by a deadline and a budget."""
