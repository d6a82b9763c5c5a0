"""Planning: the prefix order, merged duplicates, samples, units, keys, and bounded memory at a million rows."""

import itertools
import json
import os
import random
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.plan import packing, planner, token_files
from batchinfer.plan.packing import MAX_PROMPT_TOKENS, MIN_UNIT_TOKENS, cut_units
from batchinfer.plan.prefix.in_memory import last_units, plan_prefixes
from batchinfer.records import sampling_key
from support.jobs import answers, batchinfer, question, write_job, write_shard


def plan_of(prompts):
    offsets = np.cumsum([0, *map(len, prompts)])
    flat = np.array([token for prompt in prompts for token in prompt], dtype=np.int32)
    return plan_prefixes(flat, offsets, block_tokens=64)


def test_the_trie_is_walked_depth_first():
    #        1 2 ── 3        prompts 0 and 2
    #          └─── 4 5      prompt 3
    #        9               prompt 1
    plan = plan_of([[1, 2, 3], [9], [1, 2, 3], [1, 2, 4, 5]])
    assert plan.order.tolist() == [0, 2, 3, 1]
    assert plan.shared_tokens.tolist() == [0, 0, 3, 2]
    assert plan.cached_tokens.tolist() == [0, 0, 2, 2]  # the last token of a repeated prompt runs again
    assert plan.distinct_tokens == 6


@pytest.mark.parametrize("seed", range(40))
def test_each_prompt_finds_all_it_shares_with_any_earlier_one(seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(9))] for _ in range(rng.randrange(30))]
    plan = plan_of(prompts)
    seen = set()
    for index in plan.order:
        prompt = prompts[index]
        known = max((length for length in range(len(prompt) + 1) if tuple(prompt[:length]) in seen | {()}), default=0)
        assert plan.shared_tokens[index] == known
        assert plan.cached_tokens[index] == min(known, max(len(prompt) - 1, 0))
        seen |= {tuple(prompt[:length]) for length in range(1, len(prompt) + 1)}
    assert plan.distinct_tokens == len(seen)
    assert sorted(plan.order.tolist()) == list(range(len(prompts)))


def test_the_input_order_changes_neither_the_sharing_nor_the_order_of_prompts():
    rng = random.Random(0)
    prompts = [[rng.randrange(4) for _ in range(rng.randrange(1, 12))] for _ in range(50)]
    shuffled = rng.sample(prompts, len(prompts))
    first, second = plan_of(prompts), plan_of(shuffled)
    assert [prompts[i] for i in first.order] == [shuffled[i] for i in second.order]
    assert first.distinct_tokens == second.distinct_tokens


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("block_tokens", [1, 3, 8])
def test_the_last_unit_of_a_block_is_that_of_the_last_prompt_that_begins_with_it(seed, block_tokens):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 2, rng.integers(1, 20)).tolist() for _ in range(rng.integers(1, 60))]
    plan = plan_of(prompts)
    ordered = [prompts[place] for place in plan.order]
    units = np.unique(np.sort(rng.integers(0, 4, len(prompts))), return_inverse=True)[1]
    unit_starts = np.append(np.flatnonzero(np.diff(units, prepend=-1)), len(units))
    first, last = last_units(plan.shared_tokens[plan.order], unit_starts, block_tokens=block_tokens)
    expected, seen = [], set()
    for place, prompt in enumerate(ordered):
        for end in range(block_tokens, len(prompt) + 1, block_tokens):
            start = tuple(prompt[:end])
            if start not in seen:
                seen.add(start)
                unit = max(units[k] for k, other in enumerate(ordered) if tuple(other[:end]) == start)
                expected += [(place, unit)] if unit > units[place] else []
    assert list(zip(first.tolist(), last.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("tokens", "offsets", "block_tokens"), [([1, 2], [0, 1], 64), ([1, 2], [0, 2], 0), ([1, -2], [0, 2], 64)]
)
def test_impossible_input_is_refused(tokens, offsets, block_tokens):
    with pytest.raises(ValueError, match=r"offsets|block_tokens|token ids"):
        plan_prefixes(np.array(tokens), np.array(offsets), block_tokens=block_tokens)


@pytest.mark.parametrize("seed", range(10))
def test_units_keep_the_order_and_stay_near_the_target(seed):
    rng = np.random.default_rng(seed)
    new, most = rng.integers(1, 500, 5000), rng.integers(1, 100, 5000)
    starts = cut_units(new, most)
    assert starts[0] == 0
    assert starts[-1] == 5000
    assert (np.diff(starts) > 0).all()
    work = [int((new + most)[a:b].sum()) for a, b in itertools.pairwise(starts)]
    assert max(work) <= MIN_UNIT_TOKENS + 600
    assert min(work[:-1]) >= MIN_UNIT_TOKENS
    assert cut_units(new[:0], most[:0]).tolist() == [0]


def test_units_of_a_large_group_hold_more_work():
    new, most = np.full(50_000, 100), np.full(50_000, 10)
    num_units = {ranks: len(cut_units(new, most, num_ranks=ranks)) - 1 for ranks in (1, 2, 8, 32)}
    assert num_units[1] == num_units[2] > 3 * num_units[8] > 9 * num_units[32] > 0


def test_units_whose_prompts_share_a_long_start_fit_into_memory():
    # a document of 30,000 tokens, 20,000 questions on it of 3 tokens, answers of one token
    new, most, prompts = np.full(20_000, 3), np.ones(20_000, np.int64), np.full(20_000, 30_003)
    new[0] = 30_003
    for num_ranks, nodes in ((1, 1), (64, 8)):
        starts = cut_units(new, most, prompt_tokens=prompts, num_ranks=num_ranks)
        held = [int(prompts[a:b].sum()) for a, b in itertools.pairwise(starts)]
        assert max(held) <= nodes * MAX_PROMPT_TOKENS + 30_003
        assert min(held[:-1]) >= nodes * MAX_PROMPT_TOKENS
        assert sum(held) == prompts.sum()


def test_the_plan_of_a_job_merges_equal_greedy_rows_and_predicts_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 50)
    kind = pa.struct([("temperature", pa.float64()), ("max_tokens", pa.int64())])
    how = [None, None, {"max_tokens": 3}, None, {"temperature": 1.0}, {"temperature": 1.0}]
    prompts = [question(0), question(1), question(0), question(0), question(0), question(0)]
    columns = {"id": ["a", "b", "c", "d", "same", "same"], "prompt": prompts, "how": pa.array(how, kind)}
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    job = write_job(tmp_path, input={"sampling": "how"}, sampling={"n": 2, "seed": 4})
    assert batchinfer("plan", job).code == 0
    run = tmp_path / "run"
    duplicates = pq.read_table(run / "plan" / "duplicates.parquet").to_pylist()
    # greedy: rows 0 and 3 are equal, rows 1 and 2 stand alone; each is computed once for its samples
    assert {(item["row"], item["sample"]): item["of_row"] for item in duplicates} == {
        (0, 1): 0,
        (1, 1): 1,
        (2, 1): 2,
        (3, 0): 0,
        (3, 1): 0,
    }
    requests = pq.read_table(run / "plan" / "requests.parquet").to_pylist()
    assert sorted((item["row"], item["sample"]) for item in requests) == [
        (0, 0), (1, 0), (2, 0), (4, 0), (4, 1), (5, 0), (5, 1)
    ]  # fmt: skip
    keys = {(item["row"], item["sample"]): item["sampling_key"] for item in requests}
    assert keys[0, 0] == 0  # greedy draws nothing
    assert keys[4, 1] == sampling_key(4, "same", 0, 1)
    assert keys[5, 0] == sampling_key(4, "same", 1, 0)  # the second row with this id
    (summary,) = pq.read_table(run / "plan" / "summary.parquet").to_pylist()
    assert (summary["requests"], summary["duplicates"], summary["rows"]) == (7, 5, 12)
    lengths = {item["row"]: len(item["token_ids"]) for item in requests}
    assert summary["input_tokens"] == 2 * sum(lengths.get(row, lengths[0]) for row in range(6))
    assert summary["computed_tokens"] == sum(len(item["token_ids"]) - item["cached_tokens"] for item in requests)
    # two prompts, and the last token of the one that six requests share runs again for five of them
    assert summary["computed_tokens"] == summary["distinct_tokens"] + 5
    units = pq.read_table(run / "plan" / "units.parquet").to_pylist()
    assert len(units) > 1
    assert sum(unit["num_requests"] for unit in units) == 7


def test_a_plan_says_what_keeps_the_run_from_exit_code_0(tmp_path):
    prompts = [None, "", *(question(row) for row in range(6)), "far too long " * 2000]
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": prompts * 400})
    job = write_job(tmp_path, sampling={"n": 2, "max_tokens": 1})
    said = "warning: the run will end with exit code 3: error rows: 2,400{}; correct the input"
    for unreadable, shards in enumerate(("", ", shards without outputs: 1")):
        for _ in range(2):  # also when it is planned already
            ended = batchinfer("plan", job, "--set", f"output.dir=run{unreadable}")
            assert (ended.code, said.format(shards) in ended.err) == (0, True), ended.err
        counts = json.loads((tmp_path / f"run{unreadable}" / "run.json").read_text())["counts"]
        assert (counts["bad_rows"], counts["unreadable_shards"]) == (2400, unreadable)
        (tmp_path / "prompts" / "b.parquet").write_bytes(b"PAR1")
    ended = batchinfer("run", job, "--set", "output.dir=run1")
    assert ended.code == 3
    assert "2,400 of them error rows" in ended.err

    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": [question(0)]})
    (tmp_path / "prompts" / "b.parquet").unlink()
    ended = batchinfer("plan", job, "--set", "output.dir=good")
    assert (ended.code, "exit code" in ended.err) == (0, False)


def test_a_plan_says_how_a_shard_that_is_repaired_gets_in(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": [1], "prompt": [question(0)]})
    write_shard(tmp_path / "prompts" / "b.parquet", {"id": [2], "prompt": [question(1)]})
    shard = tmp_path / "prompts" / "b.parquet"
    sound, status = shard.read_bytes(), shard.stat()

    def write(content):  # the disk gives other bytes of the same file
        shard.write_bytes(content)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))

    job = write_job(tmp_path, sampling={"max_tokens": 1})
    write(b"PAR1" + bytes(60) + sound[64:])
    again = f"batchinfer plan --again {tmp_path / 'run'}"
    planned = batchinfer("plan", job)
    assert "shards without outputs: 1" in planned.err
    assert again not in planned.err
    assert batchinfer("run", job).code == 3
    write(sound)
    for command in ("plan", "run"):
        said = batchinfer(command, job).err
        assert f"warning: {shard} could not be read when this plan was made (" in said
        assert f"), so it gets no outputs; if it is repaired, `{again}` adds its rows" in said
    assert "shards without outputs" not in batchinfer(*again.split()[1:]).err
    said = batchinfer("run", job)
    assert (said.code, "could not be read" in said.err) == (0, False)
    assert [row["id"] for row in answers(tmp_path / "run")] == [1, 2]


def test_a_plan_that_goes_on_warns_of_the_shards_that_were_read_before(tmp_path, monkeypatch):
    def dies(*_):
        raise OSError("the disk is gone")

    write_shard(tmp_path / "prompts" / "a.parquet", {"id": [1, 2], "prompt": [question(0), None]})
    write_shard(tmp_path / "prompts" / "b.parquet", {"prompt": [question(1)]})
    job = write_job(tmp_path, sampling={"max_tokens": 10**6})
    monkeypatch.setattr(planner, "load_rows", dies)
    first = batchinfer("plan", job)
    monkeypatch.undo()
    going_on = batchinfer("plan", job)
    assert (first.code, going_on.code) == (1, 0)
    monkeypatch.setattr(token_files, "tokenize_shard", dies)
    again = batchinfer("plan", job, "--again")
    assert again.code == 0, again.err
    warnings = [[line for line in ended.err.splitlines() if "warning" in line] for ended in (first, going_on, again)]
    for said in warnings:
        assert said[:3] == [
            f"warning: 1 bad row in {tmp_path}/prompts/a.parquet; the first: row 1: prompt is null",
            f"warning: {tmp_path}/prompts/b.parquet has no column 'id'; its rows have null ids",
            "warning: 2 prompts are text that goes to the model as it is, although it has a chat template; set "
            'input.user = "prompt" instead of input.prompt if these are questions to it',
        ]
        assert said[3] == "warning: 2 rows leave less room than max_tokens in the window of 2,048 tokens"
    write_job(tmp_path, sampling={"max_tokens": 10**6}, output={"dir": "strict"})
    monkeypatch.undo()
    monkeypatch.setattr(planner, "load_rows", dies)
    assert batchinfer("plan", job).code == 1
    refused = batchinfer("plan", job, "--strict")
    assert refused.code == 2
    assert f"{tmp_path}/prompts/a.parquet: row 1: prompt is null; correct the row" in refused.err


def test_a_column_named_as_a_key_that_the_job_does_not_use_is_a_warning(tmp_path):
    columns = {"prompt": [question(0)], "sampling": ['{"n": 2}'], "tools": ["[]"], "chat_template_kwargs": ["{}"]}
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    write_shard(tmp_path / "prompts" / "b.parquet", {"prompt": [question(1)]})

    def warned(**inputs):
        output = {"dir": "_".join(inputs)}
        ended = batchinfer("plan", write_job(tmp_path, input={"prompt": None, **inputs}, output=output))
        assert ended.code == 0, ended.err
        unused = re.compile(
            r"warning: .*/a\.parquet has a column '(\w+)', which the job does not use; set input\.\1 = "
        )
        return unused.findall(ended.err)

    assert warned(user="prompt") == ["sampling", "tools", "chat_template_kwargs"]
    assert warned(prompt="prompt") == ["sampling"]
    assert warned(user="prompt", tools="tools", sampling="sampling") == ["chat_template_kwargs"]
    assert warned(user="prompt", system="Tools: {{ tools }}") == ["sampling", "chat_template_kwargs"]


def test_the_same_inputs_give_the_same_plan(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": [question(i % 7) for i in range(20)]})
    for name in ("one", "two"):
        job = write_job(tmp_path, output={"dir": name}, sampling={"temperature": 1.0})
        assert batchinfer("plan", job).code == 0
    for table in ("requests", "units", "duplicates"):
        one, two = ((tmp_path / name / "plan" / f"{table}.parquet").read_bytes() for name in ("one", "two"))
        assert one == two


def test_what_rows_share_does_not_depend_on_the_number_of_ranks_where_some_are_scored(tmp_path, monkeypatch):
    """Scored requests are ordered part by part, although larger groups of ranks have larger units."""
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 300)
    rng = random.Random(0)
    documents = [rng.choices(range(2, 900), k=rng.randrange(1, 60)) for _ in range(5)]
    rows = [[*rng.choice(documents), *rng.choices(range(2, 5), k=rng.randrange(1, 9))] for _ in range(200)]
    how = [json.dumps({"prompt_logprobs": 0}) if rng.random() < 0.3 else None for _ in rows]
    write_shard(tmp_path / "prompts" / "a.parquet", {"ids": rows, "how": how})
    job = write_job(tmp_path, input={"prompt": None, "token_ids": "ids", "sampling": "how"})
    plans = {}
    for ranks in (1, 4, 8, 16):
        run = tmp_path / f"run{ranks}"
        assert (
            batchinfer("plan", job, "--set", f"output.dir={run}", "--set", f"cluster.prefill_ranks={ranks}").code == 0
        )
        plans[ranks] = pq.read_table(run / "plan" / "requests.parquet")
    units = {ranks: plan["unit"].to_pylist() for ranks, plan in plans.items()}
    assert [len(set(units[ranks])) for ranks in plans] == sorted({len(set(found)) for found in units.values()})[::-1]
    assert all(found == sorted(found) for found in units.values())
    for plan in plans.values():
        assert plan.drop_columns(["unit", "last_units"]) == plans[1].drop_columns(["unit", "last_units"])


def test_rows_that_spell_control_tokens_are_counted_and_treated_as_the_job_says(tmp_path):
    texts = ["a", "b<｜User｜>", "", "<｜Assistant｜><｜User｜>", "c"]
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": texts[:3]})
    write_shard(tmp_path / "prompts" / "b.parquet", {"prompt": texts[3:]})
    for control, num_bad in (("parse", 1), ("text", 1), ("error", 3)):
        job = write_job(tmp_path, input={"control_tokens": control}, output={"dir": control})
        ended = batchinfer("plan", job)
        assert ended.code == 0
        assert re.search(r"^control +2 rows contain control tokens", ended.out, re.M)
        (summary,) = pq.read_table(tmp_path / control / "plan" / "summary.parquet").to_pylist()
        assert (summary["control_rows"], summary["bad_rows"]) == (2, num_bad)
    job = write_job(tmp_path, input={"control_tokens": "text"}, output={"dir": "parse"})
    ended = batchinfer("work", job)
    assert ended.code == 2
    assert "input columns.control_tokens was parse and is now text" in ended.err
