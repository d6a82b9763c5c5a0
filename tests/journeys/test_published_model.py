"""A published model answers as in transformers: trained weights, a large vocabulary and the model's chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.jobs import batchinfer, write_job, write_shard
from support.published_model import PACKAGE, write_published_model

pytestmark = pytest.mark.all  # downloads 93 MB; make test: the same with random weights (tests/model)

QUESTIONS = [
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is the capital of France?",
    "Translate 'good morning' into French.",
    "List five fruits.",
    "What is 17 + 25?",
    "Explain the difference between a list and a tuple in Python.",
    "Сколько будет два плюс два? 二加二等于几？ 🙂",
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return write_published_model(tmp_path_factory.mktemp("published"))
    except OSError as error:
        pytest.skip(f"NOT TESTED: {PACKAGE} cannot be downloaded: {error}")


def answers_of(folder: Path, model: Path, dtype: str, **sampling: Any) -> list[dict[str, Any]]:
    """Run a job of the questions; return its output rows in their order."""
    write_shard(folder / "questions.parquet", {"id": list(range(len(QUESTIONS))), "question": QUESTIONS})
    job = write_job(
        folder,
        name=f"{dtype}.toml",
        input={"files": ["questions.parquet"], "prompt": None, "user": "question"},
        output={"dir": dtype},
        model={"path": str(model), "dtype": dtype},
        sampling=sampling,
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    return pq.read_table(folder / dtype / "outputs").sort_by("id").to_pylist()


# by how much a log-probability is off transformers', at most and on average
@pytest.mark.parametrize(
    ("dtype", "most", "mean"), [("float32", 2e-4, 2e-5), ("bfloat16", 0.5, 0.05), ("fp8", 1.5, 0.15)]
)
def test_tokens_and_log_probabilities_are_those_of_transformers(model, tmp_path, dtype, most, mean):
    rows = answers_of(tmp_path, model, dtype, max_tokens=32, logprobs=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    off, short = [], []
    for row, question in zip(rows, QUESTIONS, strict=True):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert row["prompt_tokens"] == len(prompt)
        assert row["text"] == tokenizer.decode(row["token_ids"], skip_special_tokens=True)
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *row["token_ids"]]])).logits[0, len(prompt) - 1 : -1]
        for place, token in zip(row["logprobs"], logits.log_softmax(-1, dtype=torch.float64), strict=True):
            off.append(abs(place["logprob"] - token[place["token_id"]].item()))
            short.append((token.max() - token[place["token_id"]]).item())
    assert len(off) > 100
    print(
        f"{dtype}: off by {max(off):.1e} at most, {sum(off) / len(off):.1e} on average; {max(short):.1e} below the best"
    )
    assert max(off) < most
    assert sum(off) / len(off) < mean
    assert max(short) < 2 * most


def test_forced_json_fits_its_schema(model, tmp_path):
    rows = answers_of(tmp_path, model, "bfloat16", max_tokens=64, structured_outputs={"json": SCHEMA})
    finished = [json.loads(row["text"]) for row in rows if row["finish_reason"] == "stop"]
    assert len(finished) > len(QUESTIONS) // 2
    for answer in finished:
        jsonschema.validate(answer, SCHEMA)
