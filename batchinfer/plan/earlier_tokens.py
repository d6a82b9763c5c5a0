"""The token ids that an earlier run has of the same shards: their rows are not tokenised again."""

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
from batchinfer.run.storage import Storage
from batchinfer.rundir import read_state, shards_of_state

# what must be the same, beside the shard, for the same token ids
_SAME = ("tokenizer and template", "model.config", "version of batchinfer")
_SAME_COLUMNS = (
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
    """The tokens of an earlier run, or none.

    Args:
        storage: of the run.
        fingerprint: of the job to plan.

    Raises:
        DamagedFileError: its run.json is damaged.
    """

    def __init__(self, storage: Storage | None, fingerprint: Fingerprint) -> None:
        self._files: dict[tuple[str, ...], Path] = {}
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
        except DamagedFileError as error:  # in a bucket one is gone
            note(f"warning: tokens of the earlier run are not used: {error.path} cannot be had ({error.reason})")
            return
        self._manifest = Manifest(run.root, state.get("files"))
        for shard in shards_of_state(state):
            if shard.problem is None and run.tokens(shard.index) in self._manifest:
                self._files[_identity(shard)] = run.tokens(shard.index)

    def of(self, shard: Shard) -> ShardTokens | None:
        """What is known of a shard that is the same: path, size and footer of a file, version of an object."""
        path = self._files.get(_identity(shard))
        return None if path is None else ShardTokens(shard, path, self._manifest)


class ShardTokens:
    """The token ids of a shard's rows, in their order, as far as the file is not damaged."""

    def __init__(self, shard: Shard, path: Path, manifest: Manifest) -> None:
        self._shard = shard
        self._row_groups = _row_groups(path, manifest)
        self._rows = ENCODED.empty_table()
        self._is_damaged = False

    def take(self, num_rows: int) -> pa.RecordBatch | None:
        """The next rows as ENCODED; None when they are to be encoded again.

        That is where one of them was bad (what for, this job's checks are to say), and where the file is damaged.
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
