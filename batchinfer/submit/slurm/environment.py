"""The environment of Slurm's commands, which sbatch also hands on to the tasks.

A shell inside of a job, or one that outlived a job (tmux), has variables of that job: its processors, its memory, its
place in an array. sbatch and srun take them for options.
"""

import os

SETTINGS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")  # of Slurm's commands
# variables of a job, its steps and their process managers
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMI2_", "PMIX_", "SBATCH_CPU_BIND", "SBATCH_MEM_BIND")
# what a person has set for squeue and scancel (SQUEUE_STATES for example) would hide tasks
_OF_QUERIES = ("SQUEUE_", "SCANCEL_")
# options of sbatch that `submit` sets itself or that make it lose sight of its tasks; other defaults of a person count
_OPTIONS = ("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_CLUSTERS")


def environment() -> dict[str, str]:
    """Return this process's environment without variables that belong to other jobs or would hide tasks."""
    return {name: value for name, value in os.environ.items() if not _is_left_out(name)}


def surprising_variables() -> list[str]:
    """Return the variables that are left out although a person may have set them.

    Inside of a job those of the job are no surprise.
    """
    names = sorted(name for name in os.environ if name in _OPTIONS or _is_of_a_job(name))
    return [name for name in names if name in _OPTIONS or "SLURM_JOB_ID" not in os.environ]


def _is_left_out(name: str) -> bool:
    return name in _OPTIONS or name.startswith(_OF_QUERIES) or _is_of_a_job(name)


def _is_of_a_job(name: str) -> bool:
    return name.startswith(_OF_A_JOB) and name not in SETTINGS
