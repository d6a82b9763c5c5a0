"""Access to a Slurm cluster by sbatch, squeue, scontrol and scancel.

No command goes through a shell: each is a list of arguments, and templates get their data as arguments, so that no
path or name is run as a command.
"""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from batchinfer.records import ConfigError
from batchinfer.submit.slurm.environment import environment

ANSWER_S = 120.0  # timeout; a busy controller may be slow
# states of ended tasks that squeue may still show
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+-]*")
TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
# options that batchinfer sets itself and relies on
OWN_OPTIONS = ("--array", "--chdir", "--dependency", "--nodes", "--output", "--parsable", "--test-only", "--wrap")
SHORT_OWN_OPTIONS = ("-a", "-D", "-d", "-N", "-o")
# with these sbatch would wait for the tasks' end, or submit them to a cluster that squeue does not list
LOSING_OPTIONS, SHORT_LOSING_OPTIONS = ("--wait", "--clusters"), ("-W", "-M")
# messages while Slurm's controller restarts, and while it is busy; a busy controller may still run the command
AWAY = "Unable to contact slurm controller"
NO_ANSWER = ("Socket timed out", "Zero Bytes were transmitted")
# messages of scancel and scontrol, line by line, on tasks that have ended in the meantime and on the other tasks
OVER = ("Job has already finished", "already completing or completed", "Invalid job id specified", "No error")


class SlurmUnavailableError(ConfigError):
    """Slurm does not answer for now; the command had no effect."""


@dataclass(frozen=True, slots=True)
class Task:
    """One pending or running task."""

    job: str  # number of its array
    index: str  # in the array; "" for a job without an array
    state: str
    nodes: str
    reason: str  # why it is pending

    @property
    def name(self) -> str:
        """The name for scontrol and scancel: <array>_<index>.

        The task's job number is not unique: for one task it is the array's number, which means all tasks.
        """
        return f"{self.job}_{self.index}" if self.index else self.job

    @property
    def is_pending(self) -> bool:
        return self.state in WAITING

    @property
    def is_ending(self) -> bool:
        """Whether the task is ending: some of its processes may still run."""
        return self.state == "COMPLETING"


def check_name(option: str, value: str) -> str:
    """Check the name of a partition, account or the like, and return it.

    Raises:
        ConfigError: the name has other characters than Slurm allows.
    """
    if NAME.fullmatch(value) is None:
        raise ConfigError(f"{option} is {value!r}; a name there has letters, digits and any of _ . , : @ + - only")
    return value


def check_time(value: str) -> str:
    """Check a time limit and return it.

    Raises:
        ConfigError: `value` is no time limit of Slurm.
    """
    if TIME.fullmatch(value) is None:
        raise ConfigError(f"--time is {value!r}; write minutes, HH:MM:SS or DAYS-HH:MM:SS, for example 12:00:00")
    return value


def limit_seconds(value: str) -> int:
    """Convert a time limit to seconds: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; 0 means no limit."""
    days, dash, rest = value.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    hours, minutes, seconds = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    return (hours * 60 + minutes) * 60 + seconds


def check_extra_argument(value: str) -> str:
    """Check an additional option for sbatch and return it.

    Raises:
        ConfigError: `value` is no option, or `submit` sets it itself or cannot work with it.
    """
    if not value.startswith("-") or value in ("-", "--") or not value.isprintable():
        raise ConfigError(
            f"--sbatch-arg is {value!r}; give one whole option of sbatch, for example --sbatch-arg=--mem=0"
        )
    if _is_one_of(value, OWN_OPTIONS, SHORT_OWN_OPTIONS):
        raise ConfigError(f"--sbatch-arg is {value!r}, which submit sets itself; leave it out")
    if _is_one_of(value, LOSING_OPTIONS, SHORT_LOSING_OPTIONS):
        raise ConfigError(
            f"--sbatch-arg is {value!r}, with which submit would lose its tasks; leave it out, and for "
            "another cluster set SLURM_CLUSTERS"
        )
    return value


def log_pattern(folder: Path, pattern: str) -> str:
    """Return a path for sbatch's --output in `folder`, whose name may have any printable character but a backslash.

    Raises:
        ConfigError: Slurm would not read the folder's name as it is.
    """
    if "\\" in str(folder) or not str(folder).isprintable():
        raise ConfigError(f"{folder} holds a backslash or a control character, which Slurm cannot write logs below")
    return str(folder).replace("%", "%%") + f"/{pattern}"


def slices(tasks: int, max_array_size: int) -> list[int]:
    """Return the sizes of arrays for `tasks` tasks: as few arrays as possible, none above the limit."""
    return [min(max_array_size, tasks - first) for first in range(0, tasks, max_array_size)]


def max_array_size() -> int:
    """Return the most tasks of one array on this cluster.

    MaxArraySize limits the index, which starts at 0; max_array_tasks limits the number, if the scheduler sets it.
    """
    config = _answer(["scontrol", "show", "config"])
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", config, re.MULTILINE)
    if found is None or int(found[1]) < 2:
        raise ConfigError("this Slurm cluster allows no job arrays (MaxArraySize); run `batchinfer work` under srun")
    fewer = re.search(r"^SchedulerParameters\s*=.*\bmax_array_tasks=(\d+)", config, re.MULTILINE)
    return int(found[1]) if fewer is None else max(1, min(int(found[1]), int(fewer[1])))


def send(command: list[str]) -> str:
    """Run an sbatch command, which ends with its script and the script's arguments; return the job's number."""
    job = _answer(command).strip().partition(";")[0]
    if not job.isdigit():
        raise ConfigError(f"sbatch answered {job!r} instead of a job number; look at `squeue --me` before another try")
    return job


def live_tasks(jobs: Iterable[str]) -> list[Task]:
    """Return the pending and running tasks of jobs; jobs that Slurm does not know any more have none."""
    known = sorted(set(jobs), key=int)
    if not known:
        return []
    tasks = []
    # the first job twice: squeue refuses a single unknown job, but skips unknown jobs in a list of several
    command = ["squeue", "--noheader", "--array", f"--jobs={','.join([*known, known[0]])}", "--format=%F|%K|%T|%N|%r"]
    try:
        lines = _answer(command).splitlines()
    except ConfigError as error:
        if "Invalid job id" not in str(error):
            raise
        return []
    for line in lines:
        if not line or line.startswith("CLUSTER: "):  # printed with SLURM_CLUSTERS in spite of --noheader
            continue
        job, index, state, nodes, reason = line.strip().split("|", 4)
        if state not in ENDED:
            tasks.append(Task(job, "" if index == "N/A" else index, state, nodes, reason))
    return tasks


def cancel(names: list[str]) -> None:
    """End jobs or tasks: SIGTERM now, SIGKILL after the cluster's KillWait. Ended tasks are ignored."""
    for first in range(0, len(names), 500):
        _change(["scancel", *names[first : first + 500]])


def terminate(names: list[str]) -> None:
    """Send SIGTERM to the batch scripts only, so that tasks commit and end without a time limit."""
    for first in range(0, len(names), 500):
        _change(["scancel", "--batch", "--signal=TERM", *names[first : first + 500]])


def forbid_requeue(names: list[str]) -> None:
    """Forbid that tasks go back into the queue when they end."""
    for name in names:
        _change(["scontrol", "update", f"JobId={name}", "Requeue=0"])


def throttle(job: str, at_once: int) -> None:
    """Limit how many tasks of an array run at once (0: all)."""
    _change(["scontrol", "update", f"JobId={job}", f"ArrayTaskThrottle={at_once}"])


def is_installed() -> bool:
    """Return whether this machine has Slurm's commands."""
    try:
        subprocess.run(["squeue", "--version"], check=True, capture_output=True, timeout=ANSWER_S)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _is_one_of(value: str, options: tuple[str, ...], short_options: tuple[str, ...]) -> bool:
    """Return whether `value` is one of these options, perhaps abbreviated, with or without its argument."""
    if not value.startswith("--"):
        return value[:2] in short_options
    option = value.partition("=")[0]
    return len(option) > 3 and any(own.startswith(option) for own in options)


def _change(command: list[str]) -> None:
    """Run a command that changes jobs or tasks; errors about ended tasks are ignored. Raises as `_answer`."""
    done = _run(command)
    lines = done.stderr.splitlines() or [""]
    if done.returncode and not all(any(words in line for words in OVER) for line in lines):
        raise _refusal(command[0], done)


def _answer(command: list[str]) -> str:
    """Run one of Slurm's commands and return its standard output.

    Raises:
        SlurmUnavailableError: Slurm does not answer for now.
        ConfigError: the command is missing or fails; the message has the command's output.
    """
    done = _run(command)
    if done.returncode:
        raise _refusal(command[0], done)
    return done.stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=ANSWER_S, env=environment())
    except OSError as error:
        raise ConfigError(
            f"cannot run {command[0]} ({error.strerror}); submit from a machine that has Slurm's commands, or use "
            "`batchinfer run` on one machine"
        ) from None
    except subprocess.TimeoutExpired:
        raise _no_answer(command[0], f"nothing for {ANSWER_S:g} s") from None


def _refusal(program: str, done: subprocess.CompletedProcess[str]) -> ConfigError:
    said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
    if any(words in said for words in NO_ANSWER):
        return _no_answer(program, said)
    kind = SlurmUnavailableError if AWAY in said else ConfigError
    return kind(f"{program} refused: {said or f'exit code {done.returncode}'}")


def _no_answer(program: str, said: str) -> ConfigError:
    if program == "sbatch":  # a second try might give twice as many tasks
        return ConfigError(
            f"sbatch got no answer ({said}), and may have submitted its tasks; look at `squeue --me`, and end tasks "
            "that `batchinfer status` does not count before another try"
        )
    return SlurmUnavailableError(f"{program} got no answer ({said}); try again when Slurm does")
