"""Talks to a Slurm cluster: sbatch, squeue, scontrol and scancel.

Nothing here goes through a shell: every command is a list of arguments, and what a template needs to know it gets as
arguments of its own, so that no path or name can turn into a command.
"""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from batchinfer.records import ConfigError
from batchinfer.submit.slurm.environment import environment

ANSWER_S = 120.0  # a busy controller may take its time
# what squeue may still show of a task that has ended
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+-]*")
TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
# set by batchinfer itself; a second value would take away what it relies on
OWN_OPTIONS = ("--array", "--chdir", "--dependency", "--nodes", "--output", "--parsable", "--test-only", "--wrap")
SHORT_OWN_OPTIONS = ("-a", "-D", "-d", "-N", "-o")
# with these sbatch would not come back before the tasks have ended, or would send them where squeue does not look
LOSING_OPTIONS, SHORT_LOSING_OPTIONS = ("--wait", "--clusters"), ("-W", "-M")
# what commands say while Slurm's controller starts anew or is busy; of the latter something may come nevertheless
AWAY = "Unable to contact slurm controller"
NO_ANSWER = ("Socket timed out", "Zero Bytes were transmitted")
# what scancel and scontrol say, line by line, of tasks that have ended since we looked, and of others beside these
OVER = ("Job has already finished", "already completing or completed", "Invalid job id specified", "No error")


class AwayError(ConfigError):
    """Slurm does not answer for now, and what it was asked for is not done."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task that Slurm still knows as pending or running."""

    job: str  # of its array
    index: str  # in the array; empty for a job that is no array
    state: str
    nodes: str
    reason: str  # why it waits

    @property
    def name(self) -> str:
        """What scontrol and scancel take: the array's number and the task's. The task's own number would not do: it
        is the array's for one of the tasks, and means all of them."""
        return f"{self.job}_{self.index}" if self.index else self.job

    @property
    def is_pending(self) -> bool:
        return self.state in WAITING

    @property
    def is_ending(self) -> bool:
        """It has a signal, or has ended, but its processes may not be gone yet."""
        return self.state == "COMPLETING"


def check_name(option: str, value: str) -> str:
    """A partition, account or the like.

    Raises:
        ConfigError: it has other characters than such names have.
    """
    if NAME.fullmatch(value) is None:
        raise ConfigError(f"{option} is {value!r}; a name there has letters, digits and any of _ . , : @ + - only")
    return value


def check_time(value: str) -> str:
    """A time limit.

    Raises:
        ConfigError: Slurm would not understand it.
    """
    if TIME.fullmatch(value) is None:
        raise ConfigError(f"--time is {value!r}; write minutes, HH:MM:SS or DAYS-HH:MM:SS, for example 12:00:00")
    return value


def limit_seconds(value: str) -> int:
    """Seconds of a time limit: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. 0 is no limit."""
    days, dash, rest = value.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    hours, minutes, seconds = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    return (hours * 60 + minutes) * 60 + seconds


def check_extra_argument(value: str) -> str:
    """One more option for sbatch.

    Raises:
        ConfigError: it is no option, or one that `submit` sets itself or cannot work with.
    """
    if not value.startswith("-") or value in ("-", "--") or not value.isprintable():
        raise ConfigError(
            f"--sbatch-arg is {value!r}; give one whole option of sbatch, for example --sbatch-arg=--mem=0"
        )
    if _is_one_of(value, OWN_OPTIONS, SHORT_OWN_OPTIONS):
        raise ConfigError(f"--sbatch-arg is {value!r}, which submit sets itself; leave it out")
    if _is_one_of(value, LOSING_OPTIONS, SHORT_LOSING_OPTIONS):
        raise ConfigError(
            f"--sbatch-arg is {value!r}, with which submit would lose sight of its tasks; leave it out, and for "
            "another cluster set SLURM_CLUSTERS"
        )
    return value


def log_pattern(folder: Path, pattern: str) -> str:
    """A path for sbatch's --output in a folder whose name may hold any printable character.

    Raises:
        ConfigError: Slurm would read the folder's name as something else.
    """
    if "\\" in str(folder) or not str(folder).isprintable():
        raise ConfigError(f"{folder} holds a backslash or a control character, which Slurm cannot write logs below")
    return str(folder).replace("%", "%%") + f"/{pattern}"


def slices(tasks: int, max_array_size: int) -> list[int]:
    """Sizes of the arrays for this number of tasks: as few as possible, none above the limit."""
    return [min(max_array_size, tasks - first) for first in range(0, tasks, max_array_size)]


def max_array_size() -> int:
    """Most tasks of one array on this cluster.

    MaxArraySize bounds the index, which starts at 0; max_array_tasks, where the scheduler has such a limit, the number.
    """
    config = _answer(["scontrol", "show", "config"])
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", config, re.MULTILINE)
    if found is None or int(found[1]) < 2:
        raise ConfigError("this Slurm cluster allows no job arrays (MaxArraySize); run `batchinfer work` under srun")
    fewer = re.search(r"^SchedulerParameters\s*=.*\bmax_array_tasks=(\d+)", config, re.MULTILINE)
    return int(found[1]) if fewer is None else max(1, min(int(found[1]), int(fewer[1])))


def send(command: list[str]) -> str:
    """Run an sbatch command that ends with its script and the script's arguments; returns the job's number."""
    job = _answer(command).strip().partition(";")[0]
    if not job.isdigit():
        raise ConfigError(f"sbatch answered {job!r} instead of a job number; look at `squeue --me` before another try")
    return job


def live_tasks(jobs: Iterable[str]) -> list[Task]:
    """Tasks of these jobs that wait or run; jobs that Slurm has forgotten have none."""
    known = sorted(set(jobs), key=int)
    if not known:
        return []
    tasks = []
    # asked one by one for all: squeue refuses a single job that it has forgotten, and leaves it out of several
    command = ["squeue", "--noheader", "--array", f"--jobs={','.join([*known, known[0]])}", "--format=%F|%K|%T|%N|%r"]
    try:
        lines = _answer(command).splitlines()
    except ConfigError as error:
        if "Invalid job id" not in str(error):
            raise
        return []
    for line in lines:
        if not line or line.startswith("CLUSTER: "):  # with SLURM_CLUSTERS, whatever --noheader says
            continue
        job, index, state, nodes, reason = line.strip().split("|", 4)
        if state not in ENDED:
            tasks.append(Task(job, "" if index == "N/A" else index, state, nodes, reason))
    return tasks


def cancel(names: list[str]) -> None:
    """End jobs or tasks: SIGTERM now, SIGKILL after the cluster's KillWait. Those that have ended already are left."""
    for first in range(0, len(names), 500):
        _change(["scancel", *names[first : first + 500]])


def warn(names: list[str]) -> None:
    """SIGTERM to the batch scripts alone, so that they end in their own time."""
    for first in range(0, len(names), 500):
        _change(["scancel", "--batch", "--signal=TERM", *names[first : first + 500]])


def forbid_requeue(names: list[str]) -> None:
    """Have tasks that end not go back into the queue."""
    for name in names:
        _change(["scontrol", "update", f"JobId={name}", "Requeue=0"])


def throttle(job: str, at_once: int) -> None:
    """Limit how many tasks of a waiting or running array run at once from now on (0: all)."""
    _change(["scontrol", "update", f"JobId={job}", f"ArrayTaskThrottle={at_once}"])


def is_here() -> bool:
    """Whether this machine has Slurm's commands."""
    try:
        subprocess.run(["squeue", "--version"], check=True, capture_output=True, timeout=ANSWER_S)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _is_one_of(value: str, options: tuple[str, ...], short_options: tuple[str, ...]) -> bool:
    """Whether this is one of these options, perhaps cut short, with or without its argument."""
    if not value.startswith("--"):
        return value[:2] in short_options
    option = value.partition("=")[0]
    return len(option) > 3 and any(own.startswith(option) for own in options)


def _change(command: list[str]) -> None:
    """Change jobs or tasks; those that have ended already are left. Raises as `_answer`."""
    done = _run(command)
    lines = done.stderr.splitlines() or [""]
    if done.returncode and not all(any(words in line for words in OVER) for line in lines):
        raise _refusal(command[0], done)


def _answer(command: list[str]) -> str:
    """Standard output of one of Slurm's commands.

    Raises:
        AwayError: it does not answer for now.
        ConfigError: it is missing or refuses; the message holds what it said.
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
    kind = AwayError if AWAY in said else ConfigError
    return kind(f"{program} refused: {said or f'exit code {done.returncode}'}")


def _no_answer(program: str, said: str) -> ConfigError:
    if program == "sbatch":  # to send once more would give twice as many tasks
        return ConfigError(
            f"sbatch got no answer ({said}), and may have sent its tasks; look at `squeue --me`, and end those that "
            "`batchinfer status` does not count before another try"
        )
    return AwayError(f"{program} got no answer ({said}); try again when Slurm does")
