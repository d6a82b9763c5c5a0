"""A real Slurm on this host: munged, slurmctld and one slurmd per virtual node, all in one folder of their own.

Debian's slurmd is built for several daemons on one host (told apart by port and by -N), so that neither containers nor
systemd are needed. Nothing of the system's own configuration is read or written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
COMMANDS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")
START_S = 60.0
FIRST_PORT = 18900
KILL_WAIT_S = 20  # from SIGTERM to SIGKILL

CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
{listen}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={base}/munge/socket,cred_expire=5
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/log/slurmctld
SlurmdLogFile={base}/log/slurmd.%n
PlugStackConfig={base}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
PropagateResourceLimits=CORE
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1,default_queue_depth=1000
ReturnToService=2
MaxArraySize=9
MinJobAge=3600
JobRequeue=1
KillWait={kill_wait}
InactiveLimit=0
NodeName=node[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=node[1-{nodes}] Default=YES MaxTime=INFINITE DefaultTime=60 PriorityTier=1 GraceTime=60
PartitionName=high Nodes=node[1-{nodes}] MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF
"""


class NoSlurmError(Exception):
    """Slurm cannot be had on this machine; the text says why."""


def install() -> None:
    """Have Slurm's programs, from Debian's packages if need be.

    Raises:
        NoSlurmError: this is no Debian, we are not root, or the packages cannot be installed.
    """
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    with open(Path(tempfile.gettempdir()) / f"batchinfer-apt-{os.getuid()}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes wait here, also those that install a browser
        if all(map(shutil.which, COMMANDS)):
            return
        if os.getuid() != 0 or not Path("/etc/debian_version").exists() or shutil.which("apt-get") is None:
            raise NoSlurmError(f"Slurm is missing, and only root on Debian can install it ({' '.join(PACKAGES)})")
        with _no_system_daemons():
            _install_packages()
        missing = [command for command in COMMANDS if shutil.which(command) is None]
        if missing:
            raise NoSlurmError(f"Debian's packages were installed, but {' and '.join(missing)} are still missing")


def _install_packages() -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES]
    for update_first in (False, True):
        if update_first:
            subprocess.run(["apt-get", "update", "-q"], check=False, capture_output=True, timeout=300)
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=600)
        if done.returncode == 0:
            return
    raise NoSlurmError(f"apt-get cannot install Slurm: {done.stderr.strip().splitlines()[-1:]}")


@contextlib.contextmanager
def _no_system_daemons() -> Iterator[None]:
    """Debian starts what it installs unless this file says no."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


class Cluster:
    """The daemons, from `start` to `stop`."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        # short: the path of a socket may have 107 characters
        self.base = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.conf = self.base / "slurm.conf"

    def start(self) -> None:
        """Start all daemons; returns when all nodes are idle.

        Raises:
            NoSlurmError: a daemon does not start; the message ends with what it said.
        """
        for name in ("log", "state", "munge", *(f"spool/node{node + 1}" for node in range(self.num_nodes))):
            (self.base / name).mkdir(parents=True)
        self.base.chmod(0o755)
        (self.base / "munge").chmod(0o755)
        (self.base / "plugstack.conf").touch()
        (self.base / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.conf.write_text(self._conf())
        key = f"{self.base}/munge/key"
        self._daemon("mungekey", "--create", f"--keyfile={key}")
        os.chmod(key, 0o400)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        self._daemon("munged", *(f"--{option}={self.base}/munge/{name}" for option, name in files.items()))
        self._daemon("slurmctld", "-f", str(self.conf))
        self._wait_for("UP", "scontrol", "ping")
        for node in range(self.num_nodes):
            self._daemon("slurmd", "-c", "-f", str(self.conf), "-N", f"node{node + 1}")
        self._wait_for("\n".join(["idle"] * self.num_nodes), "sinfo", "-h", "-N", "-o", "%T")

    def stop(self) -> None:
        """End all jobs, then all daemons; the folder goes."""
        jobs = self._ask("squeue", "-h", "-o", "%A").split()
        if jobs:
            self._ask("scancel", *jobs)
            deadline = time.monotonic() + KILL_WAIT_S + 15
            while self._ask("squeue", "-h").strip() and time.monotonic() < deadline:
                time.sleep(0.1)
        pid_files = [*self.base.glob("slurmd.*.pid"), self.base / "slurmctld.pid", self.base / "munge" / "pid"]
        for path in pid_files:
            if path.exists():
                _end(int(path.read_text()), str(self.base))
        shutil.rmtree(self.base, ignore_errors=True)

    def _conf(self) -> str:
        port = _free_ports(self.num_nodes + 1)
        host = socket.gethostname().partition(".")[0]
        # the daemons then listen only on the address of the host's name, where clients find them if it is loopback
        listen = "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny" if _is_loopback() else ""
        return CONF.format(
            host=host,
            user=subprocess.run(["id", "-un"], check=True, capture_output=True, text=True).stdout.strip(),
            base=self.base,
            listen=listen,
            port=port,
            first=port + 1,
            last=port + self.num_nodes,
            nodes=self.num_nodes,
            kill_wait=KILL_WAIT_S,
        )

    def _daemon(self, program: str, *arguments: str) -> None:
        environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "SLURM_CONF": str(self.conf)}
        with open(self.base / "log" / f"{program}.start", "a+") as log:
            done = subprocess.run(
                [program, *arguments], check=False, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        if done.returncode:
            raise NoSlurmError(f"{program} does not start: {self._said(program)}")

    def _said(self, program: str) -> str:
        texts = [path.read_text(errors="replace") for path in sorted((self.base / "log").glob(f"{program}*"))]
        return " ".join("".join(texts).split())[-600:]

    def _wait_for(self, answer: str, *command: str) -> None:
        deadline = time.monotonic() + START_S
        while answer not in (said := self._ask(*command)):
            if time.monotonic() > deadline:
                raise NoSlurmError(
                    f"{command[0]} says {said!r} after {START_S:g} s: {self._said('slurmctld')} {self._said('slurmd')}"
                )
            time.sleep(0.05)

    def _ask(self, *command: str) -> str:
        environment = os.environ | {"SLURM_CONF": str(self.conf)}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60)
        return done.stdout


def _is_loopback() -> bool:
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return False


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    for first in range(FIRST_PORT, 32000, 50):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise NoSlurmError(f"there are no {count} free ports in a row")


def _end(pid: int, base: str) -> None:
    """End one of our daemons: only a process whose command line names our folder."""
    for number, wait_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        if not _is_ours(pid, base):
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while _is_ours(pid, base) and time.monotonic() < deadline:
            time.sleep(0.05)


def _is_ours(pid: int, base: str) -> bool:
    try:
        return base in Path(f"/proc/{pid}/cmdline").read_text()  # a zombie has none
    except FileNotFoundError:
        return False
