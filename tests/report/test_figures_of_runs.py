"""Every published figure of real runs, computed a second time from the files that the run has written.

Nothing of batchinfer/report/ is used here but the report itself: sums are over outputs/ and stats/, distinct prefixes
are counted from the prompts. Runs are colocated, disaggregated, short of pages, with a rank that is killed, and with
answers of an earlier run.
"""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pytest

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.config import load_model_config
from batchinfer.report.figures import PUBLISHED
from support.jobs import batchinfer, question, write_job, write_shard
from support.paths import RANDOM_MODEL

PRICES = {"gpu_hour": 2.0, "input_hit": 0.14, "input_miss": 0.55, "output": 2.19}
OTHER = "Say how a summer in the mountains smells, and what you would take along to remember it by. " * 3
PAGE_BYTES = PAGE_TOKENS * load_model_config(RANDOM_MODEL).kv_bytes_per_token(4)
# one rank ends itself after some steps, once; ranks find this by PYTHONPATH
KILLED = """
import os, signal
if "BATCHINFER_RANK_NUMBER" in os.environ:
    from batchinfer.protocol import channel, feed
    channel.Channel.send_on = lambda self, at_fault: None  # what is sent is on its way
    plain, steps = feed.Feed.send, []
    def counted(self, report, num_running=0):
        plain(self, report, num_running)
        self.send_steps()
        steps.append(report)
        if len(steps) == 30 and not os.path.exists({mark!r}):
            open({mark!r}, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    feed.Feed.send = counted
"""


@dataclass(frozen=True)
class Case:
    name: str
    cluster: dict[str, Any]
    prefill: int = 1  # ranks that run it
    decode: int = 1
    is_killed: bool = False
    has_reused: bool = False

    @property
    def is_apart(self) -> bool:
        return self.cluster.get("mode") == "disaggregated"

    @property
    def ranks(self) -> int:
        return self.prefill + self.decode if self.is_apart else self.prefill


CASES = [
    Case("one rank", {}),
    Case("two ranks", {"prefill_ranks": 2}, 2, 2),
    Case("apart 1 + 2", {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 2}, 1, 2),
    Case("tight", {"page_bytes": "least"}),
    Case("killed", {"decode_requests": 3}, is_killed=True),
    Case("reused", {}, has_reused=True),
]


MORE_CASES = [  # make test: two ranks, and one apart from two
    Case("apart 1 + 1", {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1}),
    Case("apart 2 + 1", {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 1}, 2, 1),
]


@pytest.fixture(
    scope="module",
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.all) for case in MORE_CASES)],
    ids=lambda case: case.name,
)
def ran(request, tmp_path_factory):
    """A finished run and its report."""
    case, folder = request.param, tmp_path_factory.mktemp("run")
    prompts = [question(number, (OTHER, "", OTHER * 2)[number % 3]) for number in range(24)]
    _write_prompts(folder, prompts)
    cluster = {"backend": "reference", "decode_requests": 4, **case.cluster}
    if cluster.get("page_bytes") == "least":
        cluster["page_bytes"] = _least_pages(folder) * PAGE_BYTES
    job = write_job(folder, cluster=cluster, sampling={"max_tokens": 12, "logprobs": 0}, pricing=PRICES)
    options: tuple[str, ...] = ()
    if case.has_reused:
        _write_prompts(
            folder, [f"{prompt} Now?" if number % 4 == 0 else prompt for number, prompt in enumerate(prompts)]
        )
        assert batchinfer("run", job, "--set", "output.dir=earlier").code == 3
        _write_prompts(folder, prompts)
        options = ("--reuse", str(folder / "earlier"))
    with pytest.MonkeyPatch.context() as patch:
        if case.is_killed:
            (folder / "site").mkdir()
            code = textwrap.dedent(KILLED).format(mark=str(folder / "killed"))
            (folder / "site" / "sitecustomize.py").write_text(code)
            patch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), *_python_path()]))
        done = batchinfer("run", job, *options)
    assert done.code == 3, done.err
    report = json.loads(batchinfer("report", folder / "run", "--json").out)
    return case, folder / "run", report


def _write_prompts(folder: Path, prompts: list[str]) -> None:
    for shard, rows in enumerate((prompts[:13], [*prompts[13:], prompts[3], ""])):  # a duplicate, and a bad row
        write_shard(folder / "prompts" / f"part-{shard}.parquet", {"prompt": rows})


def _python_path() -> list[str]:
    return list(filter(None, [os.environ.get("PYTHONPATH")]))


def _least_pages(folder: Path) -> int:
    """Pages of the largest request."""
    refused = batchinfer("plan", write_job(folder, name="least.toml", cluster={"page_bytes": 1},
                                           sampling={"max_tokens": 12}, output={"dir": "least"}))  # fmt: skip
    assert refused.code == 2
    return -(-int(refused.err.split("needs ")[1].split(" bytes")[0]) // PAGE_BYTES)


def one(run: Path, sql: str) -> Any:
    """The only row of a query on a run's files, as a tuple, or its only value."""
    names = {
        "outputs": "outputs/**/*.parquet",
        "tokens": "tokens/*.parquet",
        "requests": "stats/requests.parquet",
        "steps": "stats/steps/*.parquet",
        "nodes": "stats/nodes/*.parquet",
        "experts": "stats/experts/*.parquet",
        "expert_rows": "stats/expert_rows/*.parquet",
        **({"placements": "stats/placements/*.parquet"} if (run / "stats" / "placements").exists() else {}),
    }
    with duckdb.connect() as connection:
        for name, files in names.items():
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet('{run}/{files}')")
        (row,) = connection.execute(sql).fetchall()
    return row if len(row) > 1 else row[0]


def figures_of_rows(run: Path) -> dict[str, Any]:
    """Rows and tokens, from the outputs."""
    rows, ok, error, stop, length, inputs, cached, outputs = one(
        run,
        """SELECT count(*), count(*) FILTER (status = 'ok'), count(*) FILTER (status = 'error'),
        count(*) FILTER (finish_reason = 'stop'), count(*) FILTER (finish_reason = 'length'),
        sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens) FROM outputs""",
    )
    reused, reused_inputs, reused_outputs = one(
        run,
        """SELECT count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0)
        FROM requests WHERE is_reused""",
    )
    duplicates = one(
        run,
        """SELECT coalesce(sum(prompt_tokens), 0) FROM requests
        WHERE completion_tokens > generated_tokens AND NOT is_reused""",
    )
    needed = one(
        run,
        """SELECT count(DISTINCT prefix) FROM (
            SELECT unnest(list_transform(range(1, len(token_ids) + 1), lambda i: token_ids[1:i])) AS prefix
            FROM tokens JOIN requests USING (shard, row) WHERE error IS NULL AND NOT is_reused)""",
    )
    inputs, outputs = inputs - reused_inputs, outputs - reused_outputs
    if reused:  # outputs say what a run would have cached that computes all rows
        cached = inputs - needed
    kv_tokens, generated = one(
        run,
        """SELECT sum(completion_tokens * prompt_tokens + completion_tokens * (completion_tokens - 1) // 2),
        sum(completion_tokens) FROM requests WHERE generated_tokens > 0""",
    )
    return {
        "rows": rows,
        "rows_ok": ok,
        "rows_error": error,
        "reused_rows": reused,
        "reused_input_tokens": reused_inputs,
        "reused_output_tokens": reused_outputs,
        "finish_reasons": {"stop": stop, "length": length, "error": error},
        "input_tokens": inputs,
        "cached_tokens": cached,
        "memory_tokens": cached - duplicates,
        "disk_tokens": 0,
        "duplicate_tokens": duplicates,
        "cache_hit_rate": cached / inputs,
        "optimal_cached_tokens": inputs - needed,
        "needed_tokens": needed,
        "output_tokens": outputs,
        "mean_kv_tokens_per_output_token": kv_tokens / generated,
    }


def figures_of_answers(run: Path) -> dict[str, Any]:
    """Compute the quality of answers from the outputs."""
    return {
        "structured_outputs": {"rows": 0, "valid": 0, "cut": 0, "valid_share": None},
        "reasoning": {"rows": 0, "mean_tokens": None, "cut": 0, "cut_share": None, "ended": 0, "ended_share": None},
        "mean_logprob": one(run, "SELECT avg(token.logprob) FROM (SELECT unnest(logprobs) AS token FROM outputs)"),
    }


def figures_of_steps(run: Path, case: Case) -> dict[str, Any]:
    """Compute tokens and speeds from the steps."""
    prompt_tokens, prefilled, prefill_s, decoded, decode_s, comm_s, wait_s, hidden_s = one(
        run,
        """SELECT sum(new_tokens) FILTER (kind = 'prefill'), sum(new_tokens + cached_tokens) FILTER (kind = 'prefill'),
        sum(duration_s) FILTER (kind = 'prefill'), sum(output_tokens) FILTER (kind = 'decode'),
        sum(duration_s) FILTER (kind = 'decode'), sum(comm_s), sum(wait_comm_s),
        sum(hidden_comm_s) FROM steps""",
    )
    decode_needed = one(run, "SELECT sum(generated_tokens - 1) FROM requests WHERE generated_tokens > 0")
    replicated, recomputed = one(run, "SELECT sum(replicated_tokens), sum(recomputed_tokens) FROM requests")
    wasted = prompt_tokens - figures_of_rows(run)["needed_tokens"] - replicated - recomputed
    return {
        "computed_tokens": prompt_tokens,
        "replicated_tokens": replicated,
        "recomputed_tokens": recomputed,
        "wasted_prompt_tokens": wasted,
        "wasted_tokens": wasted + decoded - decode_needed,
        "prefill_tokens_per_s_per_rank": prefilled / prefill_s,
        "prefill_ranks_per_node": case.prefill,
        "prefill_tokens_per_s_per_node": prefilled / prefill_s * case.prefill,
        "decode_tokens_per_s_per_rank": decoded / decode_s,
        "decode_ranks_per_node": case.decode,
        "decode_tokens_per_s_per_node": decoded / decode_s * case.decode,
        "output_tokens_per_s_per_request": one(
            run,
            """SELECT avg((generated_tokens - 1) / (finished_s - first_token_s)) FROM requests
            WHERE generated_tokens > 1""",
        ),
        "wait_comm_share": wait_s / comm_s if comm_s else None,
        "hidden_comm_share": hidden_s / (comm_s - wait_s) if comm_s else None,
        **figures_of_overlap(run, "prefill"),
        **figures_of_overlap(run, "decode"),
    }


def figures_of_overlap(run: Path, kind: str) -> dict[str, Any]:
    """Compute the share of steps in two micro-batches, and the hidden share of the time in which rows moved."""
    moving_s, hidden_s, pairs, steps = one(
        run,
        f"""SELECT sum(comm_s - wait_comm_s), sum(hidden_comm_s), sum(CAST(micro_batches = 2 AS INT)), count(*)
        FROM steps WHERE kind = '{kind}'""",
    )
    return {
        f"overlap_{kind}": pairs / steps if moving_s else None,
        f"hidden_comm_{kind}": hidden_s / moving_s if moving_s else None,
    }


def figures_of_drafts(run: Path) -> dict[str, Any]:
    """Compute drafted tokens, and the gain over steps without guesses at the same number of requests."""
    drafted, accepted = one(run, "SELECT sum(drafted_tokens), sum(accepted_tokens) FROM steps")
    saved, took = one(
        run,
        """SELECT sum(output_tokens * plain_s / num_requests), sum(duration_s) FROM (
            SELECT *, (
                SELECT median(duration_s) FROM steps AS plain
                WHERE plain.kind = 'decode' AND plain.drafted_tokens = 0
                AND (plain.session, plain.rank, plain.num_requests) = (steps.session, steps.rank, steps.num_requests)
            ) AS plain_s FROM steps WHERE drafted_tokens > 0
        ) WHERE plain_s IS NOT NULL""",
    )
    return {
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "speculation_gain": saved / took if took else None,
    }


def figures_of_graphs(run: Path) -> dict[str, Any]:
    """Check that ranks on a CPU record no graphs, with the reason in every decode step."""
    said = "SELECT count(graph), count(*) FILTER (no_graph = 'the rank computes on a CPU'), count(no_graph) FROM steps"
    num_decode = one(run, "SELECT count(*) FROM steps WHERE kind = 'decode'")
    assert one(run, said) == (0, num_decode, num_decode)
    return {"graph_share": None, "recorded_graphs": 0}


def figures_of_weights(run: Path) -> dict[str, Any]:
    """Compute the weights that were read again; here all stay in memory."""
    names = ("weights_streamed_bytes", "weights_wait_s", "sweeps")
    sums = "sum(streamed_bytes)::BIGINT, sum(weights_wait_s), count(*) FILTER (streamed_bytes > 0)"
    return dict(zip(names, one(run, f"SELECT {sums} FROM steps"), strict=True))


def figures_of_prefill(run: Path, case: Case) -> dict[str, Any]:
    """Compute the balance of prefill from the steps of each rank."""
    names = [f"prefill_{name}_max_over_mean" for name in ("tokens", "attention")]
    if case.prefill == 1:
        return dict.fromkeys(names)
    figures = one(
        run,
        f"""SELECT sum(tokens) / sum(all_tokens) * {case.prefill}, sum(work) / sum(all_work) * {case.prefill} FROM (
            SELECT max(new_tokens) AS tokens, sum(new_tokens) AS all_tokens,
            max(attention_work) AS work, sum(attention_work) AS all_work
            FROM steps WHERE kind = 'prefill' GROUP BY session, step)""",
    )
    return dict(zip(names, figures, strict=True))


def figures_of_decode(run: Path, case: Case) -> dict[str, Any]:
    """Compute the balance of decode from the steps of each rank."""
    names = [f"decode_{kind}_{name}" for kind in ("kv", "requests") for name in ("max_over_mean", "bound")]
    if case.decode == 1:
        return dict.fromkeys(names)
    figures = one(
        run,
        f"""SELECT sum(most_kv) / sum(mean_kv), sum(greatest(mean_kv, largest)) / sum(mean_kv),
        sum(most) / sum(mean), sum(ceil(mean)) / sum(mean) FROM (
            SELECT max(kv_tokens) AS most_kv, sum(kv_tokens) / {case.decode} AS mean_kv,
            max(largest_kv_tokens) AS largest, max(num_requests) AS most, sum(num_requests) / {case.decode} AS mean
            FROM steps WHERE kind = 'decode' GROUP BY session, step)""",
    )
    return dict(zip(names, figures, strict=True))


MEASURED = "SELECT rank, placement, phase, layer, sum(rows) AS rows FROM expert_rows GROUP BY ALL"
# from the shares of the slots and the tokens sent to each expert, counted on any rank
PROMISED = """
    WITH tokens AS (
        SELECT placement, CASE WHEN mode = 'colocated' THEN 'both' ELSE phase END AS role,
               phase AS ran, layer, expert, sum(tokens) AS tokens
        FROM experts JOIN nodes USING (session) GROUP BY ALL
    )
    SELECT slots.rank + CASE WHEN slots.phase = 'decode' THEN prefill_ranks ELSE 0 END AS rank,
           placement, ran AS phase, layer, sum(share * tokens.tokens) AS rows
    FROM placements AS slots JOIN nodes USING (session) JOIN tokens USING (placement, layer, expert)
    WHERE tokens.role = slots.phase GROUP BY ALL
"""
BUSIEST = """SELECT sum(busiest) / sum(mean) FROM (
    SELECT max(rows) AS busiest, avg(rows) AS mean FROM ({rows}) GROUP BY placement, phase, layer)"""


def figures_of_experts(run: Path, case: Case) -> dict[str, Any]:
    """Compute measured and promised rows of experts in the group with several ranks."""
    names = ("max_over_mean", "promised_max_over_mean", "measured_by_promised", "furthest")
    found = dict.fromkeys(f"expert_rows_{name}" for name in names)
    counts = one(run, "SELECT sum(placements), sum(calibration_tokens) FROM nodes")
    found |= zip(("expert_placements", "calibration_tokens"), counts, strict=True)
    if max(case.prefill, case.decode) > 1:
        mine = f"SELECT * FROM ({MEASURED}) WHERE rank IN (SELECT rank FROM ({PROMISED}))"
        measured, promised = (one(run, BUSIEST.format(rows=rows)) for rows in (mine, PROMISED))
        off = one(
            run,
            f"""SELECT max(abs(measured / promised - 1)) FROM
            (SELECT rank, phase, sum(rows) AS measured FROM ({MEASURED}) GROUP BY ALL)
            JOIN (SELECT rank, phase, sum(rows) AS promised FROM ({PROMISED}) GROUP BY ALL) USING (rank, phase)""",
        )
        found |= zip(
            (f"expert_rows_{name}" for name in names), (measured, promised, measured / promised, off), strict=True
        )
    return found


def figures_of_time(run: Path, case: Case) -> dict[str, Any]:
    """Seconds and dollars of the one session."""
    wall_s, startup_s = one(run, "SELECT end_s - start_s, first_prefill_s - start_s FROM nodes")
    busy_s = one(run, "SELECT sum(duration_s) FROM steps") / case.ranks
    rows = figures_of_rows(run)
    cost = case.ranks * wall_s / 3600 * PRICES["gpu_hour"]
    misses = rows["input_tokens"] - rows["cached_tokens"]
    amounts = zip((rows["cached_tokens"], misses, rows["output_tokens"]), list(PRICES.values())[1:], strict=True)
    revenue = sum(tokens * price for tokens, price in amounts) / 1e6
    share = one(
        run, "SELECT sum(duration_s) FILTER (kind = 'prefill') / sum(duration_s) FROM steps WHERE new_tokens > 0"
    )
    prefill_cost = cost * (case.prefill / case.ranks if case.is_apart else share)
    return {
        "wall_s": wall_s,
        "rows_per_s": rows["rows"] / wall_s,
        "tokens_per_s": (rows["input_tokens"] + rows["output_tokens"]) / wall_s,
        "busy_s": busy_s,
        "startup_s": startup_s,
        "idle_s": wall_s - busy_s - startup_s,
        "peak_nodes": 1,
        "mean_nodes": 1.0,
        "gpu_hours": case.ranks * wall_s / 3600,
        "steps_outside_s": None,
        "cost_usd": cost,
        "revenue_usd": revenue,
        "cost_profit_margin": (revenue - cost) / cost,
        "gross_margin": (revenue - cost) / revenue,
        "usd_per_million_output_tokens": cost / rows["output_tokens"] * 1e6,
        "usd_per_million_tokens": cost / (rows["output_tokens"] + rows["input_tokens"]) * 1e6,
        "prefill_usd_per_million_input_tokens": prefill_cost / rows["input_tokens"] * 1e6,
        "decode_usd_per_million_output_tokens": (cost - prefill_cost) / rows["output_tokens"] * 1e6,
    }


def costs_of_parts(run: Path, case: Case) -> dict[str, float]:
    """Dollars by what ranks did in each second."""
    steps = figures_of_steps(run, case)
    times = figures_of_time(run, case)
    prefill, decode, waits, tokens = one(
        run,
        """SELECT coalesce(sum(duration_s - waits_s) FILTER (kind = 'prefill'), 0),
        coalesce(sum(duration_s - waits_s) FILTER (kind = 'decode'), 0), sum(waits_s), sum(new_tokens)
        FROM (SELECT *, exposed_comm_s AS waits_s FROM steps WHERE new_tokens > 0)""",
    )
    tail = one(
        run,
        """SELECT sum(last_s - end_s) FROM (SELECT end_s, max(end_s) OVER () AS last_s FROM (
            SELECT max(start_s + duration_s) AS end_s FROM steps WHERE new_tokens > 0 GROUP BY rank))""",
    )
    useful = 1 - steps["wasted_tokens"] / tokens
    seconds = {
        "startup": times["startup_s"] * case.ranks,
        "prefill": prefill * useful,
        "decode": decode * useful,
        "exchange": waits * useful,
        "waste": (prefill + decode + waits) * (1 - useful),
        "tail": tail,
    }
    seconds["idle"] = times["wall_s"] * case.ranks - sum(seconds.values())
    return {f"{part}_cost_usd": value / 3600 * PRICES["gpu_hour"] for part, value in seconds.items()}


def test_every_published_figure_is_what_the_files_of_the_run_say(ran):
    case, run, report = ran
    expected = (
        figures_of_rows(run)
        | figures_of_answers(run)
        | figures_of_steps(run, case)
        | figures_of_drafts(run)
        | figures_of_graphs(run)
        | figures_of_weights(run)
        | figures_of_prefill(run, case)
        | figures_of_decode(run, case)
        | figures_of_experts(run, case)
        | figures_of_time(run, case)
        | costs_of_parts(run, case)
    )
    assert expected.keys() == {figure.key.partition(".")[0] for figure in PUBLISHED}
    for key, value in expected.items():
        close = value if value is None or isinstance(value, dict) else pytest.approx(value, rel=1e-6, abs=1e-9)
        assert report[key] == close, key


def test_rows_by_layer_are_those_of_the_steps_and_near_to_the_promised_ones(ran):
    case, run, report = ran
    counted = one(run, f"SELECT list(r ORDER BY r) FROM (SELECT sum(rows) AS r FROM ({MEASURED}) GROUP BY rank, phase)")
    of_steps = "SELECT sum(expert_rows) AS r FROM steps GROUP BY rank, kind"
    if not case.is_killed:  # counts of a killed rank are lost with it
        assert [n for n in counted if n] == one(run, f"SELECT list(r ORDER BY r) FROM ({of_steps}) WHERE r > 0")
    assert (report["expert_rows_furthest"] or 0.0) <= 0.02


def test_every_prompt_token_that_ran_is_needed_replicated_recomputed_or_wasted(ran):
    case, run, report = ran
    parts = {key: report[f"{key}_tokens"] for key in ("needed", "replicated", "recomputed", "wasted_prompt")}
    assert sum(parts.values()) == report["computed_tokens"]
    # no failure: nothing is wasted, so that these have no remainder among them
    assert (parts["wasted_prompt"] > 0) == case.is_killed
    assert (report["wasted_tokens"] > 0) == case.is_killed
    assert (parts["recomputed"] > 0) == (case.name == "tight")
    assert (parts["replicated"] > 0) == (case.prefill > 1)
    assert one(run, "SELECT max(restarts) FROM nodes") == case.is_killed


def test_decode_steps_hold_the_kv_of_the_rows_and_the_report_says_it_over_time(ran):
    case, run, report = ran
    if case.is_killed:
        return  # steps of lost answers are there, too
    of_steps = one(run, "SELECT sum(kv_tokens), max(largest_kv_tokens) FROM steps WHERE kind = 'decode'")
    # prefill gives the first token of an answer; the last one is never attended to
    of_rows = one(
        run,
        """SELECT sum((generated_tokens - 1) * prompt_tokens + generated_tokens * (generated_tokens - 1) // 2),
        max(prompt_tokens + generated_tokens - 1) FROM requests WHERE generated_tokens > 1""",
    )
    assert of_steps == of_rows
    over_time = report["decode_over_time"]
    assert bool(over_time) == (case.decode > 1)
    kv_tokens = sum(stretch["num_steps"] * stretch["kv_mean"] for stretch in over_time) * case.decode
    assert kv_tokens == (pytest.approx(of_rows[0]) if case.decode > 1 else 0)
    found = report["predictions"]["decode_balance"]
    assert (found["happened"], found["at_best"]) == (report["decode_kv_max_over_mean"], report["decode_kv_bound"])
    if case.decode > 1:
        assert 1 <= found["at_best"] <= found["happened"] < 1.5
        assert 1 <= found["planned"] < 1.5


def test_the_plan_and_what_happened_are_counted_apart(ran):
    case, run, report = ran
    predicted = report["predictions"]["computed_tokens"]
    ran_tokens = one(run, "SELECT sum(new_tokens) FROM steps WHERE kind = 'prefill'")
    assert predicted["happened"] == ran_tokens
    assert predicted["planned"] == one(run, f"SELECT computed_tokens FROM read_parquet('{run}/plan/summary.parquet')")
    assert (predicted["happened"] > predicted["planned"]) == (
        case.is_killed or case.name == "tight" or case.prefill > 1
    )
    units = one(run, f"SELECT sum(computed_tokens) FROM read_parquet('{run}/stats/units.parquet')")
    assert units == ran_tokens if not case.is_killed else units < ran_tokens
