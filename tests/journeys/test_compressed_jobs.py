"""Jobs with a model whose requests keep a state besides their pages: window rows and unfinished entries."""

import os
import shutil
import signal
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchinfer.report.read import read_report
from support.compressed_models import published_tensors, random_model, write_compressed
from support.faults import descendants, wait_until
from support.jobs import answers, batchinfer, outputs, start, write_job, write_shard
from support.paths import RANDOM_MODEL

NUM_NEW = 12
SMALL = 60_000  # bytes of KV pages for the largest request and little else
PAIRS = {"decode_requests": 3, "overlap": True}
LENGTHS = (1, 3, 5, 127, 131, 300, 2, 64, 129)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, prompts some of which begin alike, and the answers of one rank."""
    folder = tmp_path_factory.mktemp("compressed")
    changes = {"sliding_window": 8, "index_topk": 3, "num_nextn_predict_layers": 1}
    write_compressed(folder / "model", published_tensors(random_model(**changes)), **changes)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, folder / "model" / file)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 96, (length,), generator=draw).tolist() for length in LENGTHS]
    prompts += [prompts[5] + one for one in prompts[:5]]
    write_shard(folder / "prompts" / "a.parquet", {"ids": pa.array(prompts, pa.list_(pa.int32()))})
    ended = run(folder, "one")
    assert ended.code == 0, ended.err
    return folder, prompts


def job_of(folder, name, **parts):
    given = {
        "input": {"prompt": None, "token_ids": "ids"},
        "model": {"path": "model"},
        "output": {"dir": name},
        "sampling": {"max_tokens": NUM_NEW, "ignore_eos": True, "logprobs": 2},
    }
    return write_job(folder, name=f"{name}.toml", **(given | parts))


def run(folder, name, **parts):
    return batchinfer("run", job_of(folder, name, **parts))


def test_answers_are_those_of_transformers(folder):
    root, prompts = folder
    theirs = random_model(sliding_window=8, index_topk=3)
    (rows,) = outputs(root / "one").values()
    pairs = list(zip(rows, prompts, strict=True))
    assert pairs[10][0]["cached_tokens"] >= 300, "its beginning is another prompt"
    for row, prompt in (*pairs[:7], pairs[10]):
        tokens = list(prompt)
        for token in row["token_ids"]:
            with torch.no_grad():
                logprobs = theirs(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
            place = len(tokens) - len(prompt)
            assert int(logprobs.argmax()) == token
            assert row["logprobs"][place]["logprob"] == pytest.approx(float(logprobs[token]), abs=1e-4)
            tokens.append(token)


@pytest.mark.parametrize(
    "cluster",
    [
        {"prefill_tokens": 64, "decode_requests": 3},
        {"prefill_ranks": 2, "decode_ranks": 2, "prefill_tokens": 100},
        {"prefill_ranks": 4, "decode_ranks": 4, "redundant_experts": 4},
        {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1, "prefill_tokens": 100},
        {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 2, "redundant_experts": 2} | PAIRS,
        {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 2, "page_bytes": SMALL},
    ],
    ids=["few-slots-and-small-chunks", "two", "four-redundant", "one-and-one", "two-and-two", "few-pages"],
)
def test_answers_do_not_depend_on_steps_and_ranks(folder, cluster, request):
    root, _ = folder
    name = request.node.callspec.id
    ended = run(root, name, cluster=cluster)
    assert ended.code == 0, ended.err
    assert answers(root / name) == answers(root / "one")


def store(name):
    return {"kv": {"dir": name, "persist": "all", "reuse": "always"}}


def test_a_store_on_disk_changes_no_answer(folder):
    root, prompts = folder
    whole_blocks = sum((len(prompt) - 1) // 128 * 128 for prompt in prompts)
    assert whole_blocks > 0
    found = {}
    for name, cluster in [
        ("cold", {"prefill_tokens": 100}),
        ("warm", {}),
        ("warm-apart", {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1, "prefill_tokens": 100}),
        ("warm-small", {"page_bytes": SMALL, "prefill_ranks": 2, "decode_ranks": 2}),
    ]:
        ended = run(root, name, cluster=cluster, **store("store"))
        assert ended.code == 0, ended.err
        assert answers(root / name) == answers(root / "one")
        found[name] = read_report(root / name).values
    assert found["cold"]["disk_tokens"] == 0 < found["cold"]["store_written_bytes"]
    for name in ("warm", "warm-apart", "warm-small"):
        assert found[name]["store_read_bytes"] > 0
        assert found[name]["store_damaged_files"] == found[name]["store_written_bytes"] == 0
        assert 0 < found[name]["disk_tokens"] <= whole_blocks


@pytest.fixture(scope="module")
def converted(folder):
    root, _ = folder
    ended = batchinfer("convert", root / "model", root / "converted", "--dtype", "float32")
    assert ended.code == 0, ended.err
    return {"model": {"path": "converted"}}


STREAMED = {"prefill_tokens": 64, "decode_requests": 1, "weights": "stream"}


@pytest.mark.parametrize(
    "cluster",
    [{}, {"page_bytes": SMALL}, {"decode_requests": 64}],
    ids=["streamed", "streamed-few-pages", "streamed-many"],
)
def test_answers_of_streamed_weights_are_the_same(folder, converted, cluster, request):
    root, _ = folder
    name = request.node.callspec.id
    ended = run(root, name, cluster=STREAMED | cluster, **converted)
    assert ended.code == 0, ended.err
    assert answers(root / name) == answers(root / "one")
    kinds = pq.read_table(root / name / "stats" / "steps").group_by(["kind"]).aggregate([("streamed_bytes", "sum")])
    assert set(kinds["kind"].to_pylist()) == {"prefill", "decode"}
    assert sum(kinds["streamed_bytes_sum"].to_pylist()) > 0


def test_streamed_and_resident_weights_share_a_store(folder, converted):
    root, _ = folder
    found = []
    for name, weights in [("cold-streamed", "stream"), ("warm-resident", "resident"), ("warm-streamed", "stream")]:
        ended = run(root, name, cluster=STREAMED | {"weights": weights}, **converted, **store("streamed-store"))
        assert ended.code == 0, ended.err
        assert answers(root / name) == answers(root / "one")
        found.append(read_report(root / name).values)
    assert found[0]["disk_tokens"] == 0 < found[0]["store_written_bytes"]
    for warm in found[1:]:
        assert warm["disk_tokens"] > 0 == warm["store_written_bytes"]


@pytest.mark.parametrize("victims", ["all", "rank"])
@pytest.mark.parametrize("parts", [{}, store("killed-store")], ids=["without-store", "with-store"])
def test_a_job_that_was_killed_goes_on_and_gives_the_same_answers(folder, parts, victims, request):
    root, _ = folder
    name = request.node.callspec.id
    given = {"cluster": {"prefill_tokens": 64, "decode_requests": 3, "commit_seconds": 0.05}} | parts
    process = start("run", job_of(root, name, **given))
    wait_until(lambda: list((root / name).glob("units/*/[0-9]*/part-*.parquet")), process)
    ranks = descendants(process.pid)
    if victims == "all":
        process.kill()
    for rank in ranks:
        with suppress(ProcessLookupError):  # it has ended with the controller
            os.kill(rank, signal.SIGKILL)
    process.communicate()
    if victims == "rank":
        assert process.returncode == 0, "the controller starts ranks again"
    else:
        assert not (root / name / "outputs").exists(), "it had ended"
    ended = run(root, name, **given)
    assert ended.code == 0, ended.err
    assert answers(root / name) == answers(root / "one")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"kv": {"dtype": "fp8"}, "model": {"path": "model", "dtype": "bfloat16"}},
            'kv.dtype is "fp8", but pages of compressed entries',
        ),
    ],
)
def test_what_a_state_cannot_do_yet_is_refused(folder, parts, words):
    ended = run(folder[0], "refused", **parts)
    assert ended.code == 2
    assert words in ended.err


def test_a_converted_folder_gives_the_same_answers(folder, converted):
    root, _ = folder
    ended = run(root, "of-converted", **converted)
    assert ended.code == 0, ended.err
    assert answers(root / "of-converted") == answers(root / "one")
