"""Answers that must be something: every one that ends is what its row asked for, however the job is run."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from support.constraints import CONSTRAINTS, TYPE, as_field, judge
from support.jobs import batchinfer, output_bytes, outputs, question, write_job, write_shard
from support.paths import RANDOM_MODEL, SAMPLE_MODEL

HOW = pa.struct([("structured_outputs", TYPE), ("temperature", pa.float64()), ("n", pa.int32())])
LAYOUTS = {
    "2 ranks": {"prefill_ranks": 2},
    "1+2 ranks": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 2},
    "few at once": {"decode_requests": 3, "prefill_tokens": 70},
}


def write(folder, model, name, *, num_rows, **cluster):
    """Greedy and drawn rows in turn, the drawn ones twice."""
    how = [
        {"structured_outputs": as_field(row), "temperature": float(row // 3 % 2), "n": 1 + row // 3 % 2}
        for row in range(num_rows)
    ]
    prompts = [question(row) for row in range(num_rows)]
    write_shard(
        folder / "prompts" / "part-0.parquet", {"id": [*range(num_rows)], "prompt": prompts, "how": pa.array(how, HOW)}
    )
    return write_job(
        folder,
        name=f"{name}.toml",
        input={"id": "id", "sampling": "how"},
        model={"path": str(model), "dtype": "float32"},
        sampling={"max_tokens": 90, "seed": 5},
        output={"dir": name},
        cluster=cluster,
    )


def expect_what_was_asked_for(run):
    rows = [row for shard in outputs(run).values() for row in shard]
    assert {row["status"] for row in rows} == {"ok"}
    ended = [row for row in rows if row["finish_reason"] == "stop"]
    for row in ended:
        judge(row["row"], row["text"])
    assert len(ended) > 0.75 * len(rows)
    report = json.loads(batchinfer("report", run, "--json").out)["structured_outputs"]
    cut = len(rows) - len(ended)
    assert report == {"rows": len(rows), "valid": len(ended), "cut": cut, "valid_share": len(ended) / len(rows)}


@pytest.mark.parametrize(
    ("model", "num_rows"),
    [
        pytest.param(RANDOM_MODEL, len(CONSTRAINTS), id="random"),
        pytest.param(RANDOM_MODEL, 300, id="random-300", marks=pytest.mark.slow),
        pytest.param(SAMPLE_MODEL, 300, id="sample-300", marks=pytest.mark.slow),
    ],
)
def test_every_answer_that_ends_is_what_its_row_asked_for(tmp_path, model, num_rows):
    job = write(tmp_path, model, "one", num_rows=num_rows)
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    expect_what_was_asked_for(tmp_path / "one")
    expected = output_bytes(tmp_path / "one")
    for name, cluster in LAYOUTS.items():
        ended = batchinfer("run", write(tmp_path, model, name, num_rows=num_rows, **cluster))
        assert ended.code == 0, ended.err
        assert output_bytes(tmp_path / name) == expected, name
