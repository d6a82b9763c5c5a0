"""Ceph's object gateway (radosgw) before the smallest Ceph: one monitor, one OSD that keeps all in memory, no copies.

Debian's packages ceph-common, ceph-mon, ceph-osd and radosgw have the programs, which need no root. All that they write
is in one folder, they listen on 127.0.0.1 alone, and they end with the process that started them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from support.object_store import KEY_ID, SECRET, Server, credentials, free_port, wait_until_it_answers

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "setpriv")
USER = "tests"
SECONDS = 120  # for each step

# The monitor does not authenticate: messages are neither signed nor sealed, which a gateway requests by default.
# A monitor collects changes for a second before it agrees on them, and ends itself on a disk that is nearly full.
_SETTINGS = """
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{port}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_msgr1 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
keyring = {folder}/keyring
run_dir = {folder}
crash_dir = {folder}
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
log_file = {folder}/$name.log
mon_cluster_log_file = {folder}/cluster.log
admin_socket =
pid_file =
paxos_propose_interval = 0.05
mon_data_avail_warn = 0
mon_data_avail_crit = 0
mon_allow_pool_size_one = true
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
"""


def why_not() -> str | None:
    """Return why Ceph's gateway cannot run here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if not missing:
        return None
    packages = "ceph-common ceph-mon ceph-osd radosgw"
    return f"NOT TESTED WITH CEPH: no {', '.join(missing)}; apt-get install --no-install-recommends {packages}"


@dataclass(frozen=True)
class Gateway(Server):
    """A running radosgw. Of writes under a condition that come at once, one succeeds."""

    folder: Path

    is_atomic: ClassVar[bool] = True
    takes_quotes: ClassVar[bool] = False
    minds_versions: ClassVar[bool] = False

    def check_permissions(self, *, on: bool) -> None:
        """From now on refuse the tests' key, or take it."""
        key = f"--access-key={KEY_ID}"
        if on:
            admin(self.folder, "key", "rm", "--key-type=s3", key)
        else:
            admin(self.folder, "key", "create", "--key-type=s3", f"--uid={USER}", key, f"--secret-key={SECRET}")


@contextmanager
def gateway(folder: Path) -> Iterator[Gateway]:
    """Start it in a folder, with credentials for it in this process's environment."""
    port, fsid = free_port(), str(uuid.uuid4())
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    (folder / "keyring").touch()
    (folder / "ceph.conf").write_text(_SETTINGS.format(fsid=fsid, port=port, folder=folder))
    _ask(
        folder, "monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{port}/0]", f"{folder}/monmap"
    )
    with ExitStack() as running:
        _ask(folder, "ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{folder}/monmap")
        running.enter_context(_process(folder, "ceph-mon", "-f", "-i", "a"))
        osd = str(uuid.uuid4())
        _ask(folder, "ceph", "osd", "new", osd, "0")
        _ask(folder, "ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd)
        running.enter_context(_process(folder, "ceph-osd", "-f", "-i", "0"))
        names = (f"--uid={USER}", f"--display-name={USER}")
        admin(folder, "user", "create", *names, f"--access-key={KEY_ID}", f"--secret-key={SECRET}")
        server = Gateway(free_port(), folder)
        listening = f"--rgw-frontends=beast endpoint=127.0.0.1:{server.port}"
        process = running.enter_context(_process(folder, "radosgw", "-f", "-n", "client.admin", listening))
        wait_until_it_answers(server.endpoint, process)
        with credentials():
            yield server


def admin(folder: Path, *arguments: str) -> None:
    """Ask for something that S3 has no request for."""
    _ask(folder, "radosgw-admin", *arguments)


def _ask(folder: Path, program: str, *arguments: str) -> None:
    """Run one of the programs to its end."""
    conf = () if program == "monmaptool" else ("-c", f"{folder}/ceph.conf")
    command = [program, *conf, *arguments]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS, env=_environment())
    assert found.returncode == 0, f"{command}: {found.stderr}"


@contextmanager
def _process(folder: Path, program: str, *arguments: str) -> Iterator[subprocess.Popen[Any]]:
    """One of the programs, while it is wanted; killed, too, when this process is."""
    command = ["setpriv", "--pdeathsig", "KILL", program, "-c", f"{folder}/ceph.conf", *arguments]
    with open(folder / f"{program}.txt", "ab") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=_environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Return the environment without variables that point the programs to another Ceph."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CEPH_")}
