"""What a plan holds in memory per row, and the types in which it writes token ids."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json
from batchinfer.config import PAGE_TOKENS, SamplingConfig
from batchinfer.data.parquet import table_writer
from batchinfer.data.schemas.internal import REQUESTS, TOKENS, smallest_token_type, with_token_type
from batchinfer.manifest import Manifest, file_checksums
from batchinfer.plan.plan_tables import write_plan
from batchinfer.plan.prefix.streamed import PrefixStream
from batchinfer.plan.requests import plan_requests, sampling_keys
from batchinfer.plan.rows import load_rows
from batchinfer.rundir import RunDir, read_state
from support.jobs import batchinfer, question, write_job, write_shard
from support.prompt_corpus import write_tokens

INT32 = pa.list_(pa.int32())


def short_prompts(num_prompts):
    """Yield prompts of 8 tokens, 4 of which many share."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, (num_prompts, 8), dtype=np.int32)
    tokens[:, :4] %= 3
    yield from ((part.ravel(), np.arange(0, part.size + 1, 8)) for part in np.array_split(tokens, num_prompts // 4000))


def bytes_held(*columns):
    """Return the bytes of the columns' values; a view of one value has one."""
    return sum(1 if column.strides == (0,) else column.nbytes for column in columns)


def peak_of_plan(folder, num_prompts):
    """Return (peak bytes of Python and NumPy, rows, requests) of planning tokenised prompts."""
    run, shards = write_tokens(folder, short_prompts(num_prompts))
    manifest = Manifest(folder)
    for shard in shards:
        manifest.add(run.tokens(shard.index), file_checksums(run.tokens(shard.index)))
    sampling = SamplingConfig(max_tokens=100).to_sampling()
    tracemalloc.start()
    with PrefixStream(run.plan_scratch, block_tokens=PAGE_TOKENS, memory_bytes=1 << 20, token_type=np.uint16) as stream:
        rows = load_rows(run, manifest, shards, sampling, stream.add)
        requests = plan_requests(rows, stream.plan())
        keys = sampling_keys(run, manifest, shards, rows, requests)
        write_plan(
            run,
            manifest,
            rows,
            requests,
            keys,
            stream.in_order(),
            num_ranks=1,
            block_tokens=PAGE_TOKENS,
            answer_lengths={},
            token_type=pa.uint16(),
        )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, rows, requests


def test_a_plan_of_many_rows_grows_by_80_bytes_a_row(tmp_path):
    peaks = {}
    for num_prompts in (40_000, 160_000):
        peaks[num_prompts], rows, requests = peak_of_plan(tmp_path / str(num_prompts), num_prompts)
    columns = (rows.shard, rows.row, rows.n, rows.max_tokens, rows.sampling_code, rows.num_tokens, rows.choice)
    assert bytes_held(*columns, rows.score_from) <= 12 * 160_000 + len(columns)
    planned = (requests.row_index, requests.place, requests.sample, requests.cached_tokens, requests.score_from)
    assert bytes_held(*planned, requests.shared_tokens, requests.group_depth) <= 20 * 160_000 + len(planned)
    assert peaks[160_000] - peaks[40_000] < 80 * 120_000


@pytest.mark.parametrize(("vocab_size", "kind"), [(1 << 16, pa.uint16()), ((1 << 16) + 1, pa.uint32())])
def test_token_ids_have_the_smallest_type_that_holds_the_vocabulary(vocab_size, kind):
    assert smallest_token_type(vocab_size) == kind
    schema = with_token_type(TOKENS.schema, kind)
    assert schema.field("token_ids").type == pa.list_(kind)
    assert schema.field("choices").type == pa.list_(pa.list_(kind))
    assert with_token_type(REQUESTS.schema, kind).names == REQUESTS.schema.names


def rewrite_as_before(run):
    """Write token ids as 32-bit integers, as earlier versions did."""
    state = read_state(run)
    manifest = Manifest(run.root, state["files"])
    for path, table in ((run.requests, REQUESTS), (run.tokens(0), TOKENS)):
        file = pq.ParquetFile(path)
        metadata = file.schema_arrow.metadata or {}
        groups = [file.read_row_group(group) for group in range(file.num_row_groups)]
        with table_writer(path, table.schema, manifest=manifest) as writer:
            for group in groups:
                writer.write_table(group.cast(table.schema))
            writer.add_key_value_metadata({key: metadata[key] for key in metadata if key == b"batchinfer.found"})
    publish_json(run.run_json, {**state, "files": manifest.as_json()})


def test_ids_are_written_in_16_bits_and_run_folders_with_32_are_finished_and_planned_again(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": [question(row % 5) for row in range(12)]})
    answers = []
    for name in ("new", "before", "again"):
        job = write_job(tmp_path, output={"dir": name}, sampling={"max_tokens": 3})
        assert batchinfer("plan", job).code == 0
        run = RunDir(tmp_path / name)
        for path in (run.requests, run.tokens(0)):
            assert pq.read_schema(path).field("token_ids").type == pa.list_(pa.uint16())
        if name != "new":
            rewrite_as_before(run)
            assert pq.read_schema(run.requests).field("token_ids").type == INT32
        if name == "again":
            assert batchinfer("plan", "--again", job).code == 0
            assert pq.read_schema(run.requests).field("token_ids").type == pa.list_(pa.uint16())
        assert batchinfer("run", job).code == 0
        answers.append((run.root / "outputs" / "a.parquet").read_bytes())
    assert answers[0] == answers[1] == answers[2]
