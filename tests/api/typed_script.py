"""A script of a user, for mypy --strict: lines with a mistake name mypy's code, reveal_type lines the type."""

# ruff: noqa: F821
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import batchinfer


@dataclass
class Person:
    name: str


def right(stream: bool, common: dict[str, Any]) -> list[int]:
    answers = batchinfer.generate(
        ["a"],
        model={"path": "m", "dtype": "bfloat16"},
        max_tokens=8,
        temperature=1,
        stop="\n",
        logit_bias={5: 1.5},
        structured_outputs={"json": Person},
        cluster={"prefill_ranks": 2, "overlap": "auto"},
        kv={"dir": "kv"},
        input={"system": "Be short."},
        output={"keep_columns": ["task"]},
        progress="tqdm",
    )
    reveal_type(answers)  # reveals: Answers
    reveal_type(answers.select(["text"]).to_pylist())  # reveals: list[dict[str, Any]]
    rows: Iterator[dict[str, Any]] = batchinfer.generate("a", model="m", max_tokens=8, stream=True)
    reveal_type(rows)  # reveals: Iterator[dict[str, Any]]
    reveal_type(batchinfer.generate("a", model="m", stream=stream))  # reveals: Answers | Iterator[dict[str, Any]]
    batchinfer.generate(["a"], model="m", progress=lambda title, done, total: print(title, done / total))
    batchinfer.generate(["a"], model="m", **common)
    with batchinfer.Model("m", dtype="float32", cluster={"prefill_ranks": 2}) as model:
        reveal_type(model.generate(["a"], max_tokens=8))  # reveals: Answers
        reveal_type(model.generate(["a"], max_tokens=8, stream=True))  # reveals: Iterator[dict[str, Any]]
    job = batchinfer.Job({"input": {"files": ["a.parquet"]}, "sampling": {"max_tokens": 8}})
    reveal_type(job.outputs())  # reveals: Answers
    job.run(progress=False)
    found: list[int] = answers["row"].to_pylist()
    return found


def wrong() -> None:
    batchinfer.generate(["a"], model="m", temprature="hot")  # mistake: call-overload
    batchinfer.generate(["a"], model="m", temperature="hot")  # mistake: call-overload
    batchinfer.generate(["a"], model="m", dtype=3)  # mistake: call-overload
    batchinfer.generate(["a"], model="m", dtype="float64")  # mistake: call-overload
    batchinfer.generate(["a"], max_tokens=8)  # mistake: call-overload
    batchinfer.generate(["a"], model="m", max_tokens="8")  # mistake: call-overload
    batchinfer.generate(["a"], model="m", stop_token_ids=["\n"])  # mistake: list-item
    batchinfer.generate(["a"], model="m", cluster={"ranks": 2})  # mistake: call-overload
    batchinfer.generate(["a"], model="m", structured_outputs={"jsn": "{}"})  # mistake: call-overload
    batchinfer.generate(["a"], model="m", progress="bar")  # mistake: call-overload
    batchinfer.generate(["a"], model="m", progress=None)  # mistake: call-overload
    batchinfer.generat(["a"], model="m")  # mistake: attr-defined
    batchinfer.Model("m", dtyp=3)  # mistake: call-arg
    batchinfer.Model("m", dtype=3)  # mistake: arg-type
    batchinfer.Model("m", max_tokens=8)  # mistake: call-arg
    batchinfer.Model("m").generate(["a"], dtype="float32")  # mistake: call-overload
    batchinfer.Model("m").generate(["a"], max_tokns=8)  # mistake: call-overload
    batchinfer.Job.from_toml("job.toml").run(progress="bar")  # mistake: arg-type
    for row in batchinfer.generate(["a"], model="m", stream=True):
        row.text  # noqa: B018  # mistake: attr-defined
