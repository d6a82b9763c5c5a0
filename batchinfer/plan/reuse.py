"""Answers of an earlier run for requests of this plan that have the same answer digest (answer_digests.py).

The new run gets them as results of its own units, with the keys and counts that its own plan gives these rows. So
workers, `finish` and `status` see a run of which some rows are computed, and an answer that is damaged later is
computed again.
"""

# Q requests in the order of execution

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.config import JobConfig
from batchinfer.config.sampling import JobSampling
from batchinfer.data.parquet import own_file, own_parquet
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.data.schemas.table import COMPUTED
from batchinfer.equal_rows import is_of_one_kind
from batchinfer.manifest import Manifest
from batchinfer.ownership import check_folder, shared_with
from batchinfer.plan.answer_digests import ANSWER_DIGEST, answer_digests, sampling_digest
from batchinfer.plan.earlier_run import earlier_run
from batchinfer.plan.forecast import PlannedWork
from batchinfer.plan.plan_tables import WrittenPlan
from batchinfer.plan.requests import PlannedRequests
from batchinfer.plan.rows import RowTable
from batchinfer.progress import Stage, note
from batchinfer.records import ConfigError, Sampling, sampling_from_json
from batchinfer.run.equality import run_equality
from batchinfer.run.fingerprint import OF_ANSWERS, OF_CODE, Fingerprint, difference
from batchinfer.run.units.counted import run_results
from batchinfer.run.units.result_files import damage, own_files, result_keys, write_results
from batchinfer.run.units.reused import REUSED, reused_folder
from batchinfer.rundir import RunDir, read_state
from batchinfer.sanitize import count_text

# parts of the fingerprint on which every answer depends; answer digests have what depends on the row
_SAME_COLUMN = "continue_final_message"
_KEY = ("shard", "row", "sample")
_KEY_BYTES = 8 * len(_KEY)
_OF_ANSWERS = ("token_ids", "sampling", "max_tokens", "score_from", "sampling_key")
_NOT_RUN = ("cached_disk_tokens", "kv_tokens_sum", *(name for name, *_ in COMPUTED))
_TIMES = ("admitted_s", "first_token_s", "finished_s")


@dataclass(frozen=True, slots=True)
class Reused:
    """The requests of a plan whose answers an earlier run has."""

    has_answer: np.ndarray  # [Q] bool
    record: dict[str, Any]  # of run.json, see run/units/reused.py


class EarlierAnswers:
    """The ok answers of an earlier run, finished or not, for the plan of a job.

    Args:
        target: folder or URI of the earlier run.
        run: run folder of the job to plan.
        fingerprint: of the job to plan.

    Raises:
        ConfigError: the answers cannot be those of this job, or not the same in every bit; or files are damaged.
        StoreError: the object store does not answer, or refuses the request.
    """

    def __init__(self, target: Path, job: JobConfig, run: RunDir, fingerprint: Fingerprint) -> None:
        storage = earlier_run(target, job)
        assert storage is not None
        self._run = storage.run
        state = read_state(self._run)
        if self._run.root.resolve() == run.root.resolve():
            raise self._refusal("this is the job's own run folder")
        if state["state"] == "planning":
            raise self._refusal("it has no complete plan")
        self._check_same(state["fingerprint"], fingerprint)
        if self._run.uri is None:
            warning = check_folder(self._run.root, shared_with(self._run.root), setting="--reuse")
            if warning is not None:
                note(warning)
        storage.fetch("results", "claims")
        self._manifest = Manifest(self._run.root, state.get("files"))
        self._files = list(run_results(self._run, self._manifest))
        self._equality = run_equality(self._run, state, self._files)
        if self._files and not is_of_one_kind(self._equality.numerics):
            kinds = self._equality.numerics or "processors that it did not record"
            raise self._refusal(f"it was computed with {kinds}, which may round differently from each other")
        job_sampling = JobSampling.model_validate(state["fingerprint"]["sampling"]).to_sampling()
        self._digests, self._keys = self._planned(job_sampling)

    def take(self, written: WrittenPlan, rows: RowTable, run: RunDir) -> Reused | None:
        """Write the answers into the units of the new plan, and return whose they are; None if there are none.

        Args:
            rows: of the new plan.
            run: folder of the new plan.
        """
        token = secrets.token_hex(4)
        digests = written.digests.combine_chunks()
        places = pc.index_in(digests, value_set=self._digests)
        wanted = np.flatnonzero(places.is_valid().to_numpy(zero_copy_only=False))
        sources = places.drop_null().to_numpy()
        order = np.argsort(sources, kind="stable")
        wanted, sources = wanted[order], sources[order]
        num_parts: Counter[int] = Counter()
        has_answer = np.zeros(len(digests), dtype=bool)
        with Stage("planning", f"reusing answers of {self._run.shown}"):
            for table in self._answers() if len(wanted) else ():
                source = pc.index_in(_key_bytes(table), value_set=self._keys).fill_null(-1).to_numpy()
                first, end = (np.searchsorted(sources, source, side=side) for side in ("left", "right"))
                counts = end - first
                answers = np.repeat(np.arange(len(source)), counts)
                ranges = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
                requests = wanted[np.repeat(first, counts) + ranges]
                is_new = ~has_answer[requests]
                answers, requests = answers[is_new], requests[is_new]
                has_answer[requests] = True
                units = np.searchsorted(written.work.unit_starts, requests, side="right") - 1
                for unit in np.unique(units).tolist():
                    of_unit = units == unit
                    part = _as_planned(table.take(answers[of_unit]), requests[of_unit], unit, written, rows)
                    folder = reused_folder(run, unit, token)
                    folder.mkdir(parents=True, exist_ok=True)
                    write_results(folder, num_parts[unit], part)
                    num_parts[unit] += 1
        num_reused = int(has_answer.sum())
        if not num_reused:
            note(
                f"warning: no request of this job has an answer in {self._run.shown}: prompts, sampling or draws "
                "differ; all rows are computed"
            )
            return None
        requests, have = count_text(len(has_answer), "request"), "has" if num_reused == 1 else "have"
        note(f"{num_reused:,} of {requests} {have} an answer in {self._run.shown}, which is reused")
        record = {
            "run": self._run.shown,
            "token": token,
            "requests_of_units": np.add.reduceat(has_answer, written.work.unit_starts[:-1], dtype=np.int64).tolist(),
            "is_all": bool(has_answer.all()),
            **asdict(self._equality),
        }
        return Reused(has_answer, record)

    def _check_same(self, recorded: Fingerprint, fingerprint: Fingerprint) -> None:
        """Refuse a run whose answers another model, dtype, setting, version or model code gave."""
        for name in (*OF_ANSWERS, *OF_CODE):
            if recorded.get(name) != fingerprint[name]:
                raise self._refusal(difference(name, recorded.get(name), fingerprint[name]))
        old, new = (columns.get(_SAME_COLUMN) for columns in (recorded["input columns"], fingerprint["input columns"]))
        if old != new:
            raise self._refusal(difference(f"input.{_SAME_COLUMN}", old, new))

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"no answer of {self._run.shown} can be reused: {reason}; name another run, or leave --reuse out"
        )

    def _planned(self, job_sampling: Sampling) -> tuple[pa.Array, pa.Array]:
        """Return the digests and keys of the earlier run's requests.

        Args:
            job_sampling: the earlier job's own sampling.
        """
        digests: list[pa.Array] = []
        keys: list[pa.Array] = []
        of_text: dict[str | None, tuple[int, int]] = {None: sampling_digest(job_sampling)}
        with own_parquet(self._run.requests, self._manifest) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=[*_KEY, *_OF_ANSWERS])
                texts = table["sampling"].to_pylist()
                of_text |= {text: sampling_digest(sampling_from_json(text)) for text in {*texts} - of_text.keys()}
                digests.append(
                    answer_digests(
                        table["token_ids"].combine_chunks(),
                        np.array([of_text[text] for text in texts], dtype=np.uint64).reshape(-1, 2),
                        *(table[name].to_numpy() for name in ("max_tokens", "score_from", "sampling_key")),
                    )
                )
                keys.append(_key_bytes(table))
        empty = pa.array([], pa.binary(_KEY_BYTES))
        return pa.chunked_array(digests, ANSWER_DIGEST).combine_chunks(), pa.concat_arrays([empty, *keys])

    def _answers(self) -> Iterator[pa.Table]:
        """Yield the ok results of each undamaged result file."""
        for path in self._files:
            reason = damage(path)
            if reason is None:
                with own_file(path):
                    table = pq.read_table(path, schema=RESULTS.schema)
                yield table.filter(pc.equal(table["status"], "ok"))
            else:
                note(f"warning: {path} is damaged ({reason}); its rows are computed again")


def reused_before(run: RunDir, written: WrittenPlan, rows: RowTable, state: dict[str, Any]) -> Reused | None:
    """Return the reused answers that a run has already, when its plan is made again; None if it has none."""
    if REUSED not in state:
        return None
    index = written.requests.row_index
    planned = zip(rows.shard[index].tolist(), rows.row[index].tolist(), written.requests.sample.tolist(), strict=True)
    found: set[tuple[int, int, int]] = set()
    for folder in run.unit_folders.glob(f"*/{reused_folder(run, 0, state[REUSED]['token']).name}"):
        sound = (path for path in own_files(folder) if damage(path) is None)
        found.update((key.shard, key.row, key.sample) for path in sound for key in result_keys(path))
    return Reused(np.array([key in found for key in planned], dtype=bool), state[REUSED])


def left_to_compute(
    written: WrittenPlan, requests: PlannedRequests, rows: RowTable, reused: Reused
) -> tuple[PlannedRequests, PlannedWork]:
    """Return the requests without an answer, in prefix order and as work, for the plan's predictions.

    Args:
        requests: of the plan in prefix order.
    """
    is_left = np.empty(len(reused.has_answer), dtype=bool)
    is_left[written.prefix_places] = ~reused.has_answer
    work, kept = written.work, np.flatnonzero(~reused.has_answer)
    shared = np.minimum(_shared_among(kept, written.requests.shared_tokens), _most_cached(written.requests, rows)[kept])
    starts = np.unique(np.searchsorted(kept, work.unit_starts))
    left_work = PlannedWork(starts, work.prompt_tokens[kept], shared, work.max_tokens[kept], work.expected_tokens[kept])
    kept = np.flatnonzero(is_left)
    shared = _shared_among(kept, requests.shared_tokens)
    left = replace(
        requests,
        row_index=requests.row_index[kept],
        place=requests.place[kept],
        sample=requests.sample[kept],
        cached_tokens=np.minimum(shared, _most_cached(requests, rows)[kept]),
        score_from=requests.score_from[kept],
        shared_tokens=shared,
        group_depth=requests.group_depth[kept],
        distinct_tokens=int((rows.num_tokens[requests.row_index[kept]] - shared).sum()),
    )
    return left, left_work


def _shared_among(kept: np.ndarray, shared_tokens: np.ndarray) -> np.ndarray:
    """Return the tokens that each kept request shares with the kept one before it: the least of those between."""
    if len(kept) == 0:
        return np.zeros(0, dtype=np.int64)
    shared = np.minimum.reduceat(shared_tokens[: kept[-1] + 1], np.concatenate([[0], kept[:-1] + 1]))
    shared[0] = 0
    return shared


def _most_cached(requests: PlannedRequests, rows: RowTable) -> np.ndarray:
    """Return [Q] leading tokens whose KV may come from elsewhere, as records.Request has them."""
    return np.where(requests.score_from > 0, requests.score_from, rows.num_tokens[requests.row_index]) - 1


def _as_planned(answers: pa.Table, requests: np.ndarray, unit: int, written: WrittenPlan, rows: RowTable) -> pa.Table:
    """Return answers as results of requests of the new plan, by number; nothing of them ran in this run."""
    index = written.requests.row_index[requests]
    zeros, unknown = np.zeros(len(requests), dtype=np.int32), pa.nulls(len(requests), pa.float64())
    changed: dict[str, Any] = {
        "shard": rows.shard[index],
        "row": rows.row[index],
        "sample": written.requests.sample[requests],
        "unit": np.full(len(requests), unit, dtype=np.int32),
        "cached_memory_tokens": written.work.shared_tokens[requests].astype(np.int32),
        **dict.fromkeys(_NOT_RUN, zeros),
        **dict.fromkeys(_TIMES, unknown),
    }
    return pa.table({name: changed.get(name, answers[name]) for name in RESULTS.schema.names}, schema=RESULTS.schema)


def _key_bytes(table: pa.Table) -> pa.Array:
    """Return the keys of results or requests as one binary column."""
    kinds = [(name, "<i8") for name in _KEY]
    keys = np.empty(table.num_rows, dtype=kinds)
    for name, _ in kinds:
        keys[name] = table[name].to_numpy()
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(_KEY_BYTES), len(keys), [None, pa.py_buffer(keys.tobytes())])
