"""Every path in a run folder, and how files are published in it."""

import errno
import json
import os
import resource
import secrets
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from batchinfer.progress import note
from batchinfer.records import ConfigError, DamagedFileError, InputError

LINE_FILES = {"parquet": (), "jsonl": (".jsonl",), "openai": (".jsonl", ".errors.jsonl")}  # by output.format
LAUNCHERS = ("slurm", "k8s", "ray")  # each has a folder of what was sent to its clusters
CHECKSUM = "checksum"  # key of a JSON document's own checksum
DELETE_STATISTICS = "delete it: statistics do without it"  # what to do when a session's are damaged

TEMPORARY = ".tmp"  # a file or folder that begins with a dot and ends so is nobody's result
NAME_BYTES = 100  # of what it is to become, in its name
REMOVALS, REMOVAL_PAUSE_S = 5, 0.1  # of a folder in which others are still busy
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)  # errors of a limit of open files: no fault of a file or a request
SYNCED_TOGETHER = 4  # files that a publisher syncs at the same time
MOST_WAITING = 64  # that are written and not in their places yet: what a kill may undo
LEFTOVER_S = 3600.0  # one that has not changed for so long was left by a process that has ended


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run folder.

    job.toml  run.json  tokens/<shard>.parquet   plan/{units,requests,duplicates,summary,experts}.parquet
    units/<unit>/<claim>/{lease.json,claim.json,part-<number>-<digest>.parquet}   done/<unit>
    quarantine/…   damaged files, by the path that they had
    outputs/<name>.parquet, and .jsonl, .errors.jsonl by output.format   dataset/{README.md,data/} by output.push
    stats/{requests,units,run}.parquet   stats/{steps,experts,nodes,kv}/<session>*.parquet
    published.json  work/sessions/<session>.json
    {slurm,k8s,ray}/<submission>.json  slurm/{goal,follower}.json  ray/{wanted,tasks}.json  {slurm,ray}/*.log
    """

    root: Path
    uri: str | None = None  # of the run folder in an object store, of which `root` is this node's copy

    @property
    def shown(self) -> str:
        return self.uri or str(self.root)

    @property
    def job(self) -> Path:
        return self.root / "job.toml"

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def requests(self) -> Path:
        return self.root / "plan" / "requests.parquet"

    @property
    def duplicates(self) -> Path:
        return self.root / "plan" / "duplicates.parquet"

    @property
    def units(self) -> Path:
        return self.root / "plan" / "units.parquet"

    @property
    def summary(self) -> Path:
        return self.root / "plan" / "summary.parquet"

    @property
    def experts(self) -> Path:
        return self.root / "plan" / "experts.parquet"

    @property
    def plan_scratch(self) -> Path:
        """Sorted token ids of a plan that is being made; gone when it is complete."""
        return self.root / "plan" / ".sorted"

    @property
    def outputs(self) -> Path:
        return self.root / "outputs"

    @property
    def dataset(self) -> Path:
        """The outputs as a Hugging Face dataset."""
        return self.root / "dataset"

    @property
    def stats(self) -> Path:
        return self.root / "stats"

    @property
    def trace(self) -> Path:
        return self.root / "trace.json"

    @property
    def lock(self) -> Path:
        return self.root / "plan.lock"

    @property
    def work(self) -> Path:
        """What only living processes need."""
        return self.root / "work"

    @property
    def finish_scratch(self) -> Path:
        return self.root / "work" / "finish"

    @property
    def published(self) -> Path:
        """What `finish` has put where output.publish says."""
        return self.root / "published.json"

    @property
    def slurm(self) -> Path:
        return self.root / "slurm"

    @property
    def goal(self) -> Path:
        """When a submitted run is to end and what it may cost."""
        return self.slurm / "goal.json"

    def heartbeat(self, session: str) -> Path:
        """A session's sign of life; gone when it has ended."""
        return self.root / "work" / "sessions" / f"{session}.json"

    def kv_transfers(self, session: str) -> Path:
        """KV on its way between hosts; gone with the command that sends it."""
        return self.root / "work" / f"transfers-{session}"

    def meeting(self, group: str) -> Path:
        """Where a group of processes on several nodes meets."""
        return self.root / "work" / f"meeting-{group}.json"

    @property
    def quarantine(self) -> Path:
        """Damaged files that were set aside."""
        return self.root / "quarantine"

    def tokens(self, shard: int) -> Path:
        return self.root / "tokens" / f"{shard:05d}.parquet"

    def token_checksums(self, shard: int) -> Path:
        """The checksums of a token file until run.json has them: a plan that was interrupted goes on with it."""
        return self.root / "tokens" / f"{shard:05d}.json"

    @property
    def unit_folders(self) -> Path:
        return self.root / "units"

    @property
    def done_marks(self) -> Path:
        """One file per unit that is done, all in one folder: a single listing tells which are."""
        return self.root / "done"

    def unit(self, unit: int) -> Path:
        return self.unit_folders / f"{unit:06d}"

    def claim(self, unit: int, claim: str) -> Path:
        return self.unit(unit) / claim

    def done(self, unit: int) -> Path:
        return self.done_marks / f"{unit:06d}"

    def output(self, shard_name: str) -> Path:
        return self.outputs / shard_name

    def stats_file(self, table: str) -> Path:
        return self.stats / f"{table}.parquet"

    def step_journal(self, session: str) -> Path:
        """Steps that a session has not committed yet."""
        return self.stats / "steps" / f"{session}.journal"

    def session_stats(self, table: str, session: str, part: int | None = None) -> Path:
        return self.stats / table / f"{session}{'' if part is None else f'-{part:05d}'}.parquet"


def launcher_folder(run: RunDir, launcher: str) -> Path:
    """What was sent to a cluster by one of LAUNCHERS, and what its tasks said."""
    return run.root / launcher


def send_lock(run: RunDir) -> Path:
    """Held by who sends or ends tasks."""
    return run.root / "send.lock"


def follower_record(run: RunDir) -> Path:
    """Which command stays and sets the number of tasks on Slurm."""
    return run.slurm / "follower.json"


def submission_records(run: RunDir) -> list[Path]:
    """The records of all that was ever sent to clusters."""
    return [path for name in LAUNCHERS for path in sorted(launcher_folder(run, name).glob("[0-9]*.json"))]


def is_run_folder(folder: str) -> bool:
    """Whether a folder holds a run; its files are no data of a job that does not name it."""
    return all(os.path.isfile(path) for path in (RunDir(Path(folder)).run_json, RunDir(Path(folder)).job))


def output_files(run: RunDir, shard_name: str, form: str) -> list[Path]:
    """The files of a shard's outputs by output.format: the Parquet file, then those of lines."""
    table = run.output(shard_name)
    return [table, *(table.with_suffix(suffix) for suffix in LINE_FILES[form])]


class Publisher:
    """Puts files into their places while the next ones are written; a disk syncs several in the time of one.

    At the end of its `with` statement all are in their places.

    Args:
        then: called with each file that is in its place.
    """

    def __init__(self, then: Callable[[Path], None] | None = None) -> None:
        self._then = then
        self._pool = ThreadPoolExecutor(SYNCED_TOGETHER)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._pool:
            if error is None:
                self.wait()

    def put(self, temporary: Path, target: Path) -> None:
        """Take a file that is written; raises what an earlier one met."""
        self._waiting.append(self._pool.submit(self._publish, temporary, target))
        self.wait(MOST_WAITING)

    def wait(self, most_waiting: int = 0) -> None:
        """Return when no more than this many are not in their places.

        Raises:
            ConfigError: one cannot be written.
        """
        while len(self._waiting) > most_waiting:
            self._waiting.popleft().result()

    def _publish(self, temporary: Path, target: Path) -> None:
        with _whole_or_absent(temporary, target):
            _put_in_place(temporary, target)
        if self._then is not None:
            self._then(target)


@contextmanager
def published(
    target: Path, scratch: Path | None = None, *, mode: int = 0o666, publisher: Publisher | None = None
) -> Iterator[Path]:
    """A temporary path beside `target`; on success synced to disk and renamed, so that `target` is whole or absent.

    Args:
        scratch: folder for the temporary file instead, on the same file system (for folders that users list).
        mode: of the file from its first byte on, less what the umask takes.
        publisher: does that later.

    Raises:
        ConfigError: the folder cannot be written (read only, full); the message names it.
    """
    try:
        for folder in {target.parent, scratch or target.parent}:
            folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = _create_beside(target, scratch or target.parent, mode)
    except OSError as error:
        raise cannot_write(target, error) from None
    os.close(handle)
    with _whole_or_absent(temporary, target):
        yield temporary
        if publisher is None:
            _put_in_place(temporary, target)
    if publisher is not None:
        publisher.put(temporary, target)


@contextmanager
def _whole_or_absent(temporary: Path, target: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # a disk that fails: `remove_leftovers` comes later
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(target, error) from None
        raise


def _put_in_place(temporary: Path, target: Path) -> None:
    sync_file(temporary)
    temporary.rename(target)
    sync_folder(target.parent)


def cannot_write(path: Path, error: OSError) -> ConfigError:
    """What to tell a person when a file of the run folder cannot be written."""
    if error.errno in NO_DESCRIPTOR:
        return too_many_files(f"cannot write {path}")
    return ConfigError(f"cannot write {path}: {error.strerror or error}; free space or choose another folder")


def too_many_files(what: str) -> ConfigError:
    """What to tell a person when something cannot be done for NO_DESCRIPTOR."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConfigError(f"{what}: no file descriptor is left (`ulimit -n` is {limit}); raise the limit of open files")


def publish_text(target: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a small text file atomically; `mode` as in `published`."""
    with published(target, mode=mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def publish_json(target: Path, value: dict[str, Any], *, mode: int = 0o666) -> None:
    """Write a JSON document with a checksum of itself atomically; `mode` as in `published`."""
    publish_text(target, json_text(value), mode=mode)


def json_text(value: dict[str, Any]) -> str:
    """A JSON document with a checksum of itself, as `read_json` wants it."""
    return json.dumps({**value, CHECKSUM: _checksum(value)}, indent=1, ensure_ascii=False) + "\n"


def read_json(path: Path, *needs: str, **remedy: str) -> dict[str, Any]:
    """Read a JSON document that `publish_json` wrote; one without a checksum, as earlier versions wrote, is believed.

    Args:
        needs: keys without which it is another document.
        remedy: of DamagedFileError.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedFileError(path, error.strerror or str(error), **remedy) from None
    return document_of(data, path, *needs, **remedy)


def document_of(data: bytes, path: Path | str, *needs: str, **remedy: str) -> dict[str, Any]:
    """The same of bytes that were read from somewhere, called `path` in messages."""
    path = Path(path)
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, str(error), **remedy) from None
    if not isinstance(value, dict):
        raise DamagedFileError(path, "it is not a JSON object", **remedy)
    checksum = value.pop(CHECKSUM, None)
    if checksum not in (None, _checksum(value)) or (checksum is None and _has_renamed_checksum(value)):
        raise DamagedFileError(path, "its checksum does not fit what it says", **remedy)
    if not value.keys() >= set(needs):
        raise DamagedFileError(path, "it is another document", **remedy)
    return value


def read_state(run: RunDir) -> dict[str, Any]:
    """What run.json says.

    Raises:
        DamagedFileError: it is missing or damaged.
    """
    return read_json(run.run_json, "state", "shards", remedy=plan_again(run.root))


def plan_again(root: Path) -> str:
    """What to do when a file of a plan is damaged."""
    return f"`batchinfer plan --again {root}` makes it anew and keeps what is computed"


def finish_again(root: Path) -> str:
    """What to do when a file that `finish` wrote is damaged."""
    return f"`batchinfer finish {root}` writes all outputs again"


def _has_renamed_checksum(value: dict[str, Any]) -> bool:
    """Whether a document without a checksum had one, whose key is damaged: `json_text` puts it last."""
    if not value:
        return False
    *keys, last = value
    return bool(value[last] == _checksum({key: value[key] for key in keys}))


def _checksum(value: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def refuse_bad_rows(run: RunDir) -> None:
    """What --strict means once a plan is made: no bad row and no unreadable shard in it.

    Raises:
        InputError: the plan holds one; the message names the first unreadable shard.
    """
    state = read_state(run)
    unreadable = [shard["path"] for shard in state["shards"] if shard["problem"] is not None]
    num_bad = state.get("counts", {}).get("bad_rows", 0)
    if unreadable or num_bad:
        named = f" ({unreadable[0]})" if unreadable else ""
        raise InputError(
            f"the plan in {run.root} holds {num_bad} bad rows and {len(unreadable)} unreadable shards{named}; "
            "correct the input and plan into another output.dir, or go on without --strict"
        )


def create_exclusively(path: Path, text: str, *, mode: int = 0o666) -> bool:
    """Create `path` with `text` in it unless it exists; True for the one process that did.

    The content is complete when the name appears: it is written beside and linked (link fails when the name is taken).
    `mode` is as in `published`.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = _create_beside(path, path.parent, mode)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            sync_folder(path.parent)
            return True
        finally:
            os.unlink(temporary)
    except OSError as error:
        raise cannot_write(path, error) from None


def file_system_s(folder: Path) -> float:
    """Unix time by the clock that dates the files in a folder; this host's own may be minutes off."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"now")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()  # the folder can only be read


def remove_leftovers(folder: Path, *, deep: bool = False) -> None:
    """Delete the temporary files and folders in a folder that dead processes left there, LEFTOVER_S ago or longer.

    Args:
        deep: in all folders below it, too.
    """
    now_s = file_system_s(folder)
    for root, folders, files in os.walk(folder):
        for name in (name for name in [*folders, *files] if name.startswith(".") and name.endswith(TEMPORARY)):
            path = Path(root, name)
            try:
                if now_s - path.lstat().st_mtime >= LEFTOVER_S:
                    shutil.rmtree(path) if name in folders else path.unlink()
            except FileNotFoundError:  # it has just got its name
                continue
            except OSError as error:
                note(f"warning: cannot delete {path}, which nobody needs: {error.strerror or error}")
        if not deep:
            break


def remove_folder(folder: Path) -> None:
    """Delete a folder in which processes of other hosts may still create and delete files.

    They end soon; what cannot be deleted by then stays, and goes with the whole work folder when the run is finished.
    """
    for _ in range(REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(REMOVAL_PAUSE_S)


def sync_file(path: Path) -> None:
    """Force a file's content to disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's names to disk, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _create_beside(target: Path, folder: Path, mode: int) -> tuple[int, Path]:
    """A new file for what is to become `target`, with this mode less the umask."""
    start = os.fsdecode(os.fsencode(target.name)[:NAME_BYTES])  # the whole is no longer than a long name of a target
    path = folder / f".{start}.{secrets.token_hex(4)}{TEMPORARY}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), path
