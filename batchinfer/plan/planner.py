"""Planning of a job: read, check and tokenise every row, order the requests, cut work units, predict.

No model is loaded. Every file appears whole or not at all, so an interrupted plan continues where it stopped.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.balance.request_load import RequestLoad
from batchinfer.checked_json import publish_json
from batchinfer.config import PAGE_TOKENS, JobConfig
from batchinfer.config.model_folder import config_file
from batchinfer.data.encoders import Encoders
from batchinfer.data.expert_tables import write_expert_tables
from batchinfer.data.schemas.internal import PLAN_SUMMARY, smallest_token_type
from batchinfer.data.shard_schemas import id_type
from batchinfer.data.shards import has_same_bytes
from batchinfer.data.tokenizer_process import TokenizerProcess
from batchinfer.manifest import Manifest
from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.page_format import FP8, PageFormat, block_tokens
from batchinfer.ownership import group_id, make_folder
from batchinfer.plan.earlier_run import earlier_run, learn
from batchinfer.plan.earlier_tokens import EarlierTokens
from batchinfer.plan.expected_speeds import expected_speeds
from batchinfer.plan.inputs import Prepared, find_inputs, refuse_unreadable_input
from batchinfer.plan.plan_tables import write_plan, write_rows
from batchinfer.plan.prefix.streamed import PrefixStream
from batchinfer.plan.preflight import check_job, check_names, memory_note
from batchinfer.plan.requests import plan_requests, sampling_keys
from batchinfer.plan.reuse import EarlierAnswers, left_to_compute, reused_before
from batchinfer.plan.rows import RowTable, load_rows
from batchinfer.plan.summary import count_plan, predict
from batchinfer.plan.token_files import keep_sound_token_files, tokenize_shards
from batchinfer.plan.unused_plan import delete_unused_plan
from batchinfer.progress import Stage, note
from batchinfer.records import ConfigError, DamagedFileError, RunMismatchError, Shard
from batchinfer.run.fingerprint import check_same, job_fingerprint
from batchinfer.run.job_file import publish_job
from batchinfer.run.planned import trust_run
from batchinfer.run.publish import claim_place
from batchinfer.run.quarantine import set_aside
from batchinfer.run.session import Session
from batchinfer.run.store.interface import MADE, Storage
from batchinfer.run.store.open import storage_of
from batchinfer.run.units.reused import REUSED, offer_reused, remove_stale_answers
from batchinfer.rundir import RunDir, check_no_bad_rows, read_state, shards_of_state, shards_to_state, was_planned

PREFIX_MEMORY_BYTES = 64 << 20  # for token ids; a job with more than a quarter of it is sorted on disk
NAMED_KEYS = 20  # of config.json, in a warning
LARGE_BYTES = 1 << 20
M_MMAP_THRESHOLD = -3  # of glibc's mallopt


def plan_job(
    job: JobConfig,
    session: Session,
    *,
    strict: bool,
    learn_from: Path | None = None,
    expert_loads: Path | None = None,
    reuse: Path | None = None,
    can_run_here: Callable[[], None] | None = None,
    again: Callable[[RunDir, Manifest], None] | None = None,
    tokenizer: TokenizerProcess | None = None,
) -> RunDir:
    """Make the plan of a job in its run folder, or find the plan that is there.

    Args:
        learn_from: folder or URI of an earlier run, for answer lengths, speeds and expert loads.
        expert_loads: folder or URI of an earlier run, for expert loads alone.
        reuse: folder or URI of an earlier run, whose answers equal requests of this plan get.
        tokenizer: the tokenizer process, if it was started already.
        can_run_here: raises an error if the job's ranks cannot run on this machine; called before anything is written.
        again: make the plan again, as a repair. The function is called with the new plan's manifest before the plan
            becomes valid, to set aside results of another plan.

    Raises:
        ConfigError, ModelError: the job, its files or its model cannot work.
        InputError: no shard can be read; or `strict` and a shard or row is bad.
        RunMismatchError: the run folder has results of another job, or output.publish belongs to another job.
        StoreError: an object store of input.files or output.publish does not answer, or refuses the request.
    """
    started = time.monotonic()
    model = load_model_config(Path(job.model.path))
    check_job(job, model)
    with Encoders(job, window=model.max_positions, process=tokenizer) as encoders:
        shards, kept = find_inputs(job, encoders, strict=strict)
        fingerprint = job_fingerprint(job, shards, encoders.digest)
        earlier = earlier_run(learn_from, job)
        learned = learn(earlier, earlier_run(expert_loads, job), model, fingerprint)
        run = (storage := storage_of(job)).run
        if can_run_here is not None:
            can_run_here()
        with _locked(storage, job, again=again is not None):
            check_names(run, shards, job.output.format)
            claim_place(job, fingerprint)
            state = publish_job(run, job, _open_run(storage, job, fingerprint, shards, again=again is not None))
            session.attach(storage)
            if state["state"] == "planning":
                tokens = EarlierTokens(earlier, fingerprint)
                answers = None if reuse is None else EarlierAnswers(reuse, job, run, fingerprint)
                prepared = Prepared(job, run, Manifest(run.root), encoders, model, learned, tokens, answers, kept)
                if again is not None:
                    storage.fetch("results", "claims")
                shards, summary, reused = _plan(prepared, shards, session, state, started=started, strict=strict)
                if again is not None:
                    again(run, prepared.manifest)
                session.check_run()
                state = {**state, "state": "planned", "counts": summary, **reused}
                _publish_state(prepared, state, shards)
                storage.commit(again=again is not None)
            else:
                storage.commit()  # job.toml
                note(f"{run.shown} is planned already; going on with this plan")
                _warn_of_left_out(run, state, shards)
                is_new_to_plan = reuse is not None and REUSED not in state
                if learn_from is not None or expert_loads is not None or is_new_to_plan:
                    note("--learn-from, --expert-loads and --reuse count when a plan is made; this plan stays as it is")
            offer_reused(storage, state)
    if strict:
        check_no_bad_rows(run)
    return run


def _open_run(
    storage: Storage, job: JobConfig, fingerprint: dict[str, Any], shards: list[Shard], *, again: bool
) -> dict[str, Any]:
    """Return the content of run.json; write it if it does not exist, or if the plan is made again."""
    run, carried = storage.run, {}
    if run.run_json.exists():
        try:
            state = read_state(run)
        except DamagedFileError as error:
            if not again:
                raise
            set_aside(run, error.path, error.reason)
        else:
            if _is_same(storage, state, fingerprint, shards, again=again):
                if not again:
                    storage.fetch("plan")
                    return state
                carried = {key: state[key] for key in (MADE, "id", REUSED) if key in state}
                storage.fetch("plan", "tokens")
                keep_sound_token_files(run, Manifest(run.root, state.get("files")), shards_of_state(state))
    state = {
        "id": secrets.token_hex(8),  # random, so that two runs of the same job differ
        **carried,
        "state": "planning",
        "fingerprint": fingerprint,
        **shards_to_state(shards),
        "id_type": str(id_type(shards, job.input.id)),
    }
    publish_json(run.run_json, state)
    return state


def _is_same(
    storage: Storage, state: dict[str, Any], fingerprint: dict[str, Any], shards: list[Shard], *, again: bool
) -> bool:
    """Return whether the plan in the run folder is this job's; delete another job's plan if it has no results."""
    run = storage.run
    try:
        paths = {shard.name: shard.path for shard in [*shards_of_state(state), *shards]}
        check_same(state["fingerprint"], {**fingerprint, **_edited(state, fingerprint, shards)}, run.shown, paths)
    except RunMismatchError as mismatch:
        if again:
            raise
        storage.fetch("plan", "results", "claims", "stats", "signs", "sent")
        delete_unused_plan(run, state, mismatch)
        note(f"{run.shown} held the plan of another job without results; the folder is planned again")
        return False
    return True


def _edited(state: dict[str, Any], fingerprint: dict[str, Any], shards: list[Shard]) -> dict[str, Any]:
    """Return the part of the fingerprint on the shards, where those differ that were edited under the same footer."""
    before = {shard.name: shard for shard in shards_of_state(state)}
    edited = {shard.name for shard in shards if shard.name in before and not has_same_bytes(before[shard.name], shard)}
    return {
        "input shards": [[*entry, "edited"] if entry[0] in edited else entry for entry in fingerprint["input shards"]]
    }


def _warn_of_left_out(run: RunDir, state: dict[str, Any], shards: list[Shard]) -> None:
    """Warn of shards that were damaged while the plan was made and may be repaired by now."""
    found = {shard.name for shard in shards if shard.problem is None}
    for shard in shards_of_state(state):
        if shard.problem is not None and shard.name in found:
            note(
                f"warning: {shard.path} could not be read when this plan was made ({shard.problem}), so it gets no "
                f"outputs; if it is repaired, `batchinfer plan --again {run.shown}` adds its rows"
            )


def _publish_state(prepared: Prepared, state: dict[str, Any], shards: list[Shard]) -> None:
    """Write the planned state to run.json with the checksums of all files; remove the separate ones of token files."""
    run = prepared.run
    found = {"tool_forms": prepared.encoders.tool_forms, **shards_to_state(shards)}
    publish_json(run.run_json, {**state, **found, "files": prepared.manifest.as_json()})
    for shard in shards:
        run.token_checksums(shard.index).unlink(missing_ok=True)


def _plan_experts(prepared: Prepared) -> None:
    """Place the experts by the loads of an earlier run, if there is one."""
    if prepared.learned.expert_loads is not None:
        # imported here because numba is slow to load, and only these jobs need it
        from batchinfer.plan.expert_plan import plan_experts

        tables = plan_experts(prepared.job.cluster, prepared.model, prepared.learned.expert_loads)
        if tables:
            write_expert_tables(prepared.run.experts, tables, prepared.manifest)


def _plan(
    prepared: Prepared,
    shards: list[Shard],
    session: Session,
    state: dict[str, Any],
    *,
    started: float,
    strict: bool,
) -> tuple[list[Shard], dict[str, Any], dict[str, Any]]:
    """Tokenise rows, order requests, cut units, take answers of an earlier run, and predict.

    Args:
        state: content of run.json.

    Returns:
        The shards with new problems, the summary, and what run.json says of reused answers.
    """
    job, run, manifest, model = prepared.job, prepared.run, prepared.manifest, prepared.model
    if model.unknown_keys:
        note(_unknown_keys_warning(job, model))
    if model.carrier is not None:
        others = " and ".join(f"{prefix}*" for prefix in model.carrier.skipped)
        note(f"only the language model of {job.model.path} runs; its tensors {others} are not read")
    sampling = job.sampling
    if sampling.n > 1 and sampling.temperature == 0 and job.input.sampling is None and job.input.format != "openai":
        note(
            f"warning: the {sampling.n} samples of a row are equal at temperature 0; set sampling.temperature, or n = 1"
        )
    if job.kv.dtype == FP8:
        note("KV is stored in FP8 (kv.dtype): answers differ from those with KV in bfloat16")
    rope = model.attention.rope
    if rope.rope_type == "longrope" and (original := rope.original_max_positions) < model.max_positions:
        note(
            f"the angles of all requests are by long_factor (longrope), as the window of {model.max_positions:,} "
            f"tokens is above original_max_position_embeddings = {original:,}; transformers takes short_factor "
            "up to there"
        )
    if (needed := memory_note(job, model)) is not None:
        note(needed)
    _plan_experts(prepared)
    _remove_leftovers(run)
    remove_stale_answers(run, state)
    shards = tokenize_shards(prepared, shards, strict=strict)
    prepared.encoders.close()
    _release_freed_memory()  # of the rows' texts
    refuse_unreadable_input(shards)
    _return_large_arrays()
    token_type = smallest_token_type(model.vocab_size)
    with (
        Stage("planning", "ordering the requests"),
        PrefixStream(
            run.plan_scratch,
            block_tokens=PAGE_TOKENS,
            memory_bytes=PREFIX_MEMORY_BYTES,
            token_type=token_type.to_pandas_dtype(),
        ) as prefixes,
    ):
        rows = load_rows(run, manifest, shards, job.sampling.to_sampling(), prefixes.add)
        _release_freed_memory()
        _check_memory(job, model, rows, shards)
        requests = plan_requests(rows, prefixes.plan())
        _release_freed_memory()
        keys = sampling_keys(run, manifest, shards, rows, requests)
        written = write_plan(
            run,
            manifest,
            rows,
            requests,
            keys,
            prefixes.in_order(),
            num_ranks=max(job.cluster.num_prefill_ranks, job.cluster.num_decode_ranks),
            block_tokens=block_tokens(job, model),
            answer_lengths=prepared.learned.answer_lengths,
            token_type=token_type,
            with_digests=prepared.answers is not None,
        )
    answers = prepared.answers
    reused = reused_before(run, written, rows, state) if answers is None else answers.take(written, rows, run)
    work = written.work
    totals = {"requests": len(work.max_tokens), "units": len(work.unit_starts) - 1, "reused_requests": 0}
    if reused is not None:
        requests, work = left_to_compute(written, requests, rows, reused)
        num_left = len(work.max_tokens)
        totals |= {"requests": num_left, "reused_requests": totals["requests"] - num_left}
    speeds, gpus_per_node = expected_speeds(prepared, work)
    plan_s = time.monotonic() - started
    held_before_s = plan_s if session.command == "run" else 0.0
    summary = {
        **count_plan(shards, rows, requests, work, plan_s),
        **totals,
        **predict(
            job,
            work,
            speeds,
            request_load=RequestLoad(*model.decode_loads),
            held_before_s=held_before_s,
            gpus_per_node=gpus_per_node,
        ),
    }
    if speeds is not None and job.cluster.finish_hours is not None and summary["nodes_to_finish"] is None:
        hours = f"{job.cluster.finish_hours:g} h"
        note(f"warning: no number of nodes finishes within {hours}: a work unit or the longest answer takes longer")
    write_rows(run.summary, manifest, PLAN_SUMMARY.schema, summary)
    return shards, summary, {} if reused is None else {REUSED: reused.record}


def _return_large_arrays() -> None:
    """Let glibc return each freed array of LARGE_BYTES or more to the system at once.

    By default glibc raises that limit to the size of the largest array that was freed, and then keeps the others.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, LARGE_BYTES)


def _release_freed_memory() -> None:
    """Return freed memory to the system. glibc keeps it between arrays that are still in use; Arrow keeps its own."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _locked(storage: Storage, job: JobConfig, *, again: bool) -> Iterator[None]:
    """Lock the run folder for planning; refuse foreign files, other owners and unsuitable file systems."""
    run = storage.run
    gid = group_id(job.output.shared_group, "output.shared_group")
    try:
        run.root.parent.mkdir(parents=True, exist_ok=True)
        make_folder(run.root, gid)
        trust_run(run, job)
        foreign = [path.name for path in run.root.iterdir() if path != run.lock and not _is_leftover(path, run)]
        if run.uri is None and foreign and not run.run_json.exists() and not (again and run.job.exists()):
            if was_planned(run):
                read_state(run)  # raises: run.json is missing
            raise ConfigError(f"output.dir {run.root} holds files but no run; choose an empty or a new folder")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot write output.dir {run.root}: {reason}; choose another folder") from None
    if run.uri is not None:
        storage.check()  # before the lock, which needs the same operations: the check has a clearer error
    with storage.locked(doing="plan this job"):
        if run.uri is None:
            storage.check()
        yield


def _is_leftover(path: Path, run: RunDir) -> bool:
    """Return whether a file was left by a plan that was killed at its start."""
    return path.name.startswith((f".{run.run_json.name}.", ".probe-"))


def _remove_leftovers(run: RunDir) -> None:
    """Delete the half-written tables of a plan that was killed: they can be as large as the whole job."""
    for table in (run.tokens(0), run.requests):
        for path in table.parent.glob(".*.parquet.*.tmp"):
            path.unlink(missing_ok=True)


def _unknown_keys_warning(job: JobConfig, model: ModelConfig) -> str:
    more = len(model.unknown_keys) - NAMED_KEYS
    return (
        f"warning: {config_file(Path(job.model.path))} has keys that are not known here and not used: "
        f"{', '.join(model.unknown_keys[:NAMED_KEYS])}{f' and {more} more' if more > 0 else ''}; "
        "answers are wrong if the model needs them"
    )


def _check_memory(job: JobConfig, model: ModelConfig, rows: RowTable, shards: list[Shard]) -> None:
    """Refuse a page budget in which the largest request could never run."""
    if job.cluster.page_bytes is None or len(rows.row) == 0:
        return
    # the last generated token is never attended to, so it needs no KV
    tokens = rows.num_tokens + np.maximum(rows.max_tokens - 1, 0)
    largest = int(np.argmax(tokens))
    page_bytes = PAGE_TOKENS * PageFormat.of(job).bytes_per_token(model)
    needed = -(-int(tokens[largest]) // PAGE_TOKENS) * page_bytes
    if needed > job.cluster.page_bytes:
        name = next(shard.path for shard in shards if shard.index == rows.shard[largest])
        raise ConfigError(
            f"cluster.page_bytes is {job.cluster.page_bytes}, but row {rows.row[largest]} of {name} needs {needed} "
            f"bytes of KV for {tokens[largest]} tokens; raise it to at least {needed}, or lower max_tokens"
        )
