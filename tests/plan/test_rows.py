"""The rows of a plan: what they hold of their own samplings."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter

from batchinfer.config import SamplingConfig
from batchinfer.plan.rows import SamplingTexts
from batchinfer.records import sampling_to_json
from support.jobs import batchinfer, question, write_job, write_shard

KEYS = ['"structured": ', ', "temperature": ']


def text_of(**values) -> str:
    return sampling_to_json(SamplingConfig(max_tokens=4, **values).to_sampling())


def test_samplings_are_told_apart_and_given_back_as_they_came():
    found = [
        text_of(),
        text_of(seed=1),
        text_of(temperature=0.5),
        text_of(structured_outputs={"choice": KEYS}, stop=KEYS),
        text_of(structured_outputs={"choice": KEYS}, stop=KEYS[::-1], seed=1),
        text_of(structured_outputs={"choice": KEYS[::-1]}, bad_words=KEYS),
        '{"seed": 1}',
    ]
    texts = SamplingTexts()
    assert [texts.code_of(text) for text in [*found, *found[::-1]]] == [*range(7), *range(6, -1, -1)]
    assert [texts[code] for code in range(7)] == list(texts) == found


def test_a_schema_that_all_rows_have_is_held_once():
    properties = {f"property_{number}": {"type": "string", "title": "x" * 100} for number in range(100)}
    text = text_of(structured_outputs={"json": {"type": "object", "properties": properties}}, seed=123456)
    num_rows = 1000
    tracemalloc.start()
    try:
        texts = SamplingTexts()
        for seed in range(num_rows):
            texts.code_of(text.replace("123456", str(seed)))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < num_rows * len(text) / 10
    assert [json.loads(one)["seed"] for one in texts] == list(range(num_rows))


def test_planning_reads_the_sampling_of_each_row_once(tmp_path, monkeypatch):
    samplings = [{"seed": row, "temperature": row % 2 / 2, "max_tokens": 2} for row in range(20)]
    columns = {"id": list(range(20)), "prompt": list(map(question, range(20))), "how": samplings}
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    job = write_job(tmp_path, input={"sampling": "how"})
    read, plain = Counter(), json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: (read.update([text]), plain(text, **options))[1])
    assert batchinfer("plan", job).code == 0
    assert [times for text, times in read.items() if str(text).startswith('{"bad_words": ')] == [1] * 20
