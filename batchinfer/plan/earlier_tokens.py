"""Token ids of an earlier run for shards that did not change, whose rows need not be tokenised again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from batchinfer.data.columns import ENCODED
from batchinfer.data.parquet import own_parquet
from batchinfer.manifest import Manifest
from batchinfer.ownership import check_folder, shared_with
from batchinfer.progress import note
from batchinfer.records import ConfigError, DamagedFileError, Shard
from batchinfer.run.fingerprint import Fingerprint
from batchinfer.run.store.interface import Storage
from batchinfer.rundir import read_state, shards_of_state

# parts of the fingerprint, in addition to the shard, on which token ids depend
_SAME = ("tokenizer and template", "model.config", "version of batchinfer")
_SAME_COLUMNS = (
    "user",
    "prompt",
    "messages",
    "template",
    "format",
    "system",
    "chat_template_kwargs",
    "tools",
    "continue_final_message",
    "control_tokens",
    "choices",
)


class EarlierTokens:
    """Token files of an earlier run that the job to plan can use; none if the jobs differ in a relevant setting.

    Args:
        storage: storage of the earlier run.
        fingerprint: of the job to plan.

    Raises:
        DamagedFileError: run.json of the earlier run is damaged.
    """

    def __init__(self, storage: Storage | None, fingerprint: Fingerprint) -> None:
        self._files: dict[tuple[str, ...], tuple[Shard, Path]] = {}
        if storage is None:
            return
        run = storage.run
        state = read_state(run)
        recorded, columns = state["fingerprint"], fingerprint["input columns"]
        old_columns = recorded.get("input columns", {})
        if any(recorded.get(name) != fingerprint[name] for name in _SAME) or any(
            old_columns.get(name) != columns[name] for name in _SAME_COLUMNS
        ):
            return
        try:
            check_folder(run.root, shared_with(run.root), setting="--learn-from")
        except ConfigError as error:
            note(f"warning: tokens of the earlier run are not used: {error}")
            return
        try:
            storage.fetch("tokens")
        except DamagedFileError as error:  # a file is missing in the bucket
            note(f"warning: tokens of the earlier run are not used: {error.path} cannot be read ({error.reason})")
            return
        self._manifest = Manifest(run.root, state.get("files"))
        for shard in shards_of_state(state):
            if shard.problem is None and run.tokens(shard.index) in self._manifest:
                self._files[_identity(shard)] = shard, run.tokens(shard.index)

    def of(self, shard: Shard) -> ShardTokens | None:
        """Return the earlier tokens of a shard; None if it has none or changed (path, size, footer, version, rows).

        A Parquet file has changed, too, if neither its time of writing nor all its bytes are the same.
        """
        if (found := self._files.get(_identity(shard))) is None:
            return None
        earlier, path = found
        if earlier.written_ns != shard.written_ns and earlier.content != shard.content:
            return None
        return ShardTokens(shard, path, self._manifest)


class ShardTokens:
    """Reader of a shard's token ids in the order of rows, up to the first damaged part of the file."""

    def __init__(self, shard: Shard, path: Path, manifest: Manifest) -> None:
        self._shard = shard
        self._row_groups = _row_groups(path, manifest)
        self._rows = ENCODED.empty_table()
        self._is_damaged = False

    def take(self, num_rows: int) -> pa.RecordBatch | None:
        """Return the next rows as columns.ENCODED; None if they must be encoded again.

        Rows are encoded again if one of them was bad, because this job's checks may differ, or if the file is damaged.
        """
        try:
            while self._rows.num_rows < num_rows and not self._is_damaged:
                self._rows = pa.concat_tables([self._rows, next(self._row_groups)])
        except DamagedFileError as error:
            note(f"warning: {error.path} is damaged ({error.reason}); {self._shard.path} is tokenised again from there")
            self._is_damaged = True
        if self._is_damaged:
            return None
        found, self._rows = self._rows.slice(0, num_rows), self._rows.slice(num_rows)
        return found.combine_chunks().to_batches()[0] if found["error"].null_count == num_rows else None


def _row_groups(path: Path, manifest: Manifest) -> Iterator[pa.Table]:
    with own_parquet(path, manifest) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=ENCODED.names).select(ENCODED.names).cast(ENCODED)


def _identity(shard: Shard) -> tuple[str, ...]:
    return shard.path, str(shard.size_bytes), shard.footer, shard.version, str(shard.num_rows)
