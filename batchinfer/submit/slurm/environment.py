"""The environment of Slurm's commands, which sbatch also passes to the tasks.

A shell inside a job, or a shell that outlived its job (tmux), has variables of that job: its processors, its memory,
its index in an array. sbatch and srun would read them as options.
"""

import os

SETTINGS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")  # settings of Slurm's commands
# variables of a job, its steps and their process managers
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMI2_", "PMIX_", "SBATCH_CPU_BIND", "SBATCH_MEM_BIND")
# a user's defaults for squeue and scancel, such as SQUEUE_STATES, would hide tasks
_OF_QUERIES = ("SQUEUE_", "SCANCEL_")
# options of sbatch that `submit` sets itself or that hide its tasks; other defaults of a user are kept
_OPTIONS = ("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_CLUSTERS")


def environment() -> dict[str, str]:
    """Return this process's environment without variables that belong to other jobs or would hide tasks."""
    return {name: value for name, value in os.environ.items() if not _is_left_out(name)}


def surprising_variables() -> list[str]:
    """Return the removed variables that a user may have set on purpose.

    Inside a job the variables of that job are not reported.
    """
    names = sorted(name for name in os.environ if name in _OPTIONS or _is_of_a_job(name))
    return [name for name in names if name in _OPTIONS or "SLURM_JOB_ID" not in os.environ]


def _is_left_out(name: str) -> bool:
    return name in _OPTIONS or name.startswith(_OF_QUERIES) or _is_of_a_job(name)


def _is_of_a_job(name: str) -> bool:
    return name.startswith(_OF_A_JOB) and name not in SETTINGS
