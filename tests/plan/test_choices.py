"""Rows with choices as prompts: one per choice, and equal tokens are not the same when other ones are scored."""

import pyarrow as pa
import pytest

from batchinfer.data.schemas.table import TOKEN_IDS
from batchinfer.plan import rows as plan_rows
from batchinfer.plan.rows import prompts_of
from support.jobs import answers, batchinfer, write_job, write_shard

CHOICES = pa.list_(TOKEN_IDS)


def read(prompts):
    return [
        (
            part.row[k],
            part.choice[k],
            part.score_from[k],
            part.token_ids[part.offsets[k] : part.offsets[k + 1]].tolist(),
        )
        for part in prompts
        for k in range(len(part.row))
    ]


def test_rows_without_choices_are_their_prompts():
    tokens = pa.array([[1, 2], [3]], TOKEN_IDS)
    assert read(prompts_of(tokens, pa.nulls(2, CHOICES))) == [(0, 0, 0, [1, 2]), (1, 0, 0, [3])]


@pytest.mark.parametrize("most_tokens", [1, 4, 1 << 23])
def test_each_choice_is_a_prompt_with_what_comes_before_it(monkeypatch, most_tokens):
    monkeypatch.setattr(plan_rows, "MOST_TOKENS", most_tokens)
    tokens = pa.array([[9], [1, 2], [3], [4, 5, 6]], TOKEN_IDS).slice(1)  # as a filter or a row group leaves them
    choices = pa.array([[[0]], [[7], [8, 9]], [[1]], [[2, 2, 2], [3], [4]]], CHOICES).slice(1)
    assert read(prompts_of(tokens, choices)) == [
        (0, 0, 2, [1, 2, 7]),
        (0, 1, 2, [1, 2, 8, 9]),
        (1, 0, 1, [3, 1]),
        (2, 0, 3, [4, 5, 6, 2, 2, 2]),
        (2, 1, 3, [4, 5, 6, 3]),
        (2, 2, 3, [4, 5, 6, 4]),
    ]


def test_equal_tokens_of_another_prompt_are_scored_by_themselves(tmp_path):
    columns = {"ids": [[5, 6, 7], [5, 6], [5, 6, 7]], "options": [[[8]], [[7, 8]], [[8], [8]]]}
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    inputs = {"prompt": None, "token_ids": "ids", "choices": "options"}
    job = write_job(tmp_path, input=inputs, sampling={"max_tokens": 0})
    ended = batchinfer("run", job)
    assert ended.code == 0
    assert "2 duplicates" in ended.err
    rows = answers(tmp_path / "run")
    assert [row["choice_num_tokens"] for row in rows] == [[1], [2], [1, 1]]
    assert rows[2]["choice_logprobs"] == rows[0]["choice_logprobs"] * 2
    assert rows[1]["choice_logprobs"][0] < rows[0]["choice_logprobs"][0]
