"""The sample model: how it is trained, that its folder is sound, and that it answers held-out prompts through a job."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from batchinfer.data.tokenizer import load_tokenizer
from support.jobs import batchinfer, write_job
from support.paths import DEMO_JOB, ROOT, SAMPLE_MODEL, SAMPLE_PROMPTS

sys.path.append(str(ROOT / "sample_data" / "train"))  # scripts, which import each other by file name

import make_prompts
import train
from accuracy import evaluate
from batches import BatchMaker
from chat import ASSISTANT_ID, EOS_ID, USER_ID, train_tokenizer
from export import config_json, published_weights, read_published
from shape import ModelShape
from tasks import GENERATORS, Example, draw_example, is_held_out

from model import SampleModel, predict

TOLERANCE = {"float32": 1e-4}
MIN_ACCURACY, MIN_TASK_ACCURACY, MIN_ACCEPTANCE = 0.95, 0.90, 0.70
SMALL = ModelShape(hidden_size=32, intermediate_size=48, moe_intermediate_size=8, num_hidden_layers=2)
ROWS = tuple((task, 2) for task in GENERATORS)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(seed=1)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """dtype -> output rows of the sample prompts on the sample model, computed when first asked for."""
    made: dict[str, list[dict]] = {}

    def get(dtype: str) -> list[dict]:
        if dtype not in made:
            made[dtype] = run_job(tmp_path_factory.mktemp(dtype), dtype)
        return made[dtype]

    return get


def run_job(folder: Path, dtype: str) -> list[dict]:
    job = write_job(
        folder,
        input={"files": [f"{SAMPLE_PROMPTS}/*.parquet"], "prompt": None, "id": "id", "messages": "messages"},
        output={"dir": "run", "keep_columns": ["task", "expected"]},
        model={"path": str(SAMPLE_MODEL), "dtype": dtype},
        sampling={"max_tokens": 32},
    )
    ended = batchinfer("run", job)
    assert ended.code == 3, ended.err  # finished, with the bad rows as error rows
    return ds.dataset(folder / "run" / "outputs").to_table().to_pylist()


def right_of(rows: list[dict]) -> dict[str, list[bool]]:
    """Per task, whether each row's text is the expected one; rows without an expected text are left out."""
    right: dict[str, list[bool]] = {}
    for row in rows:
        if row["expected"] is not None:
            right.setdefault(row["task"], []).append(row["text"] == row["expected"])
    return right


# ---- the data


def test_a_segment_is_its_prefix_once_and_then_its_rows(tokenizer):
    #   prefix (short: begin token and 3 more)   0 1 2 3
    #   row 0                                            4 5 ...  <User>question<Assistant>answer<end>
    #   row 1                                            4 5 ...  shorter, padded with the end token
    maker = BatchMaker(tokenizer, seed=0)
    long, short = Example("total", "10 crowns and 20 crowns.", "30 crowns", False), Example("total", "1.", "3", False)
    batch = maker.pack({"total": [[long], [short]]}, prefix_tokens=3)
    (segment,) = batch.segments
    width = segment.row_tokens
    assert (segment.num_prefix, segment.num_rows, len(batch.tokens)) == (4, 2, 4 + 2 * width)
    assert batch.positions.tolist() == [*range(4), *range(4, 4 + width), *range(4, 4 + width)]
    rows = batch.tokens[4:].view(2, width)
    assert rows[:, 0].tolist() == [USER_ID, USER_ID]
    assert batch.next_tokens[3] == USER_ID
    # places point at the token before each answer token: the first at <Assistant>, the last at the last answer token
    answers = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("30 crowns", "3")]
    assert batch.next_tokens[batch.places].tolist() == [*answers[0], EOS_ID, *answers[1], EOS_ID]
    assert batch.tokens[batch.places[0]] == ASSISTANT_ID
    assert batch.after_next.tolist() == [*answers[0][1:], EOS_ID, -100, EOS_ID, -100]
    assert int(batch.counted.sum()) == len(batch.tokens) - (width - 6)  # row 1: <User> 1 . <Assistant> 3 <end>


@pytest.mark.parametrize("task", GENERATORS)
def test_training_never_draws_what_is_held_out(task):
    rng = random.Random(0)
    training = {draw_example(task, rng, held_out=False).question for _ in range(2000)}
    held_out = {draw_example(task, rng, held_out=True).question for _ in range(200)}
    assert not training & held_out
    shares = [is_held_out(task, GENERATORS[task](rng)[0]) for _ in range(3000)]
    assert 0.05 < sum(shares) / len(shares) < 0.2


def test_the_committed_prompts_are_those_that_the_script_makes(tmp_path):
    make_prompts.write_shards(
        make_prompts.make_rows(make_prompts.DEFAULT_ROWS, random.Random(make_prompts.SEED)), tmp_path
    )
    committed = ds.dataset(SAMPLE_PROMPTS).to_table()
    assert ds.dataset(tmp_path).to_table().equals(committed)


@pytest.mark.parametrize("num_rows", [20, 1000])
def test_prompts_of_any_number_have_duplicates_and_bad_rows(tmp_path, num_rows):
    make_prompts.write_shards(make_prompts.make_rows(num_rows, random.Random(1)), tmp_path)
    table = pa.concat_tables(pq.read_table(path) for path in sorted(tmp_path.glob("*.parquet")))
    rows = table.to_pylist()
    assert len(rows) == num_rows
    assert sum(row["expected"] is None for row in rows) == 6
    assert len({str(row["messages"]) for row in rows}) < num_rows
    assert sum(row["id"] is None for row in rows) == 1


# ---- the training


def test_a_row_behind_a_shared_prefix_is_predicted_as_if_alone(tokenizer):
    torch.manual_seed(0)
    model = SampleModel(SMALL)
    maker = BatchMaker(tokenizer, seed=0)
    rng = random.Random(0)
    examples = {task: [[draw_example(task, rng, held_out=False)] for _ in range(3)] for task in GENERATORS}
    with torch.no_grad():
        together = predict(model, maker.pack(examples), torch.float32)
        alone = [
            predict(model, maker.pack({task: [row]}), torch.float32) for task, rows in examples.items() for row in rows
        ]
    for name in ("next_logits", "after_next_logits"):
        expected = torch.cat([getattr(prediction, name) for prediction in alone])
        assert (getattr(together, name) - expected).abs().max() < TOLERANCE["float32"]


@pytest.mark.all  # make test: the card names the committed weights
def test_a_resumed_training_ends_with_the_same_weights(tokenizer, tmp_path):
    recipe = train.Recipe(steps=4, short_steps=2, rows=ROWS, judge_rows=2, judge_every=2, checkpoint_every=1)
    whole, first, second = (train.Run(recipe, tokenizer) for _ in range(3))
    assert train.train(whole, tmp_path, limit_s=1000)
    for _ in range(3):
        first.train_step()
    first.save(tmp_path / "half.pt")
    second.load(tmp_path / "half.pt")
    second.train_step()
    ours, theirs = second.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_correction_bias_moves_against_the_load():
    router = SampleModel(SMALL).routers()[0]
    router.load_E.copy_(torch.tensor([9.0] * 2 + [1.0] * 14))
    router.balance(0.001)
    assert torch.allclose(router.e_score_correction_bias, torch.tensor([-0.001] * 2 + [0.001] * 14))
    assert router.load_E.sum() == 0


# ---- the folder


def test_transformers_finds_every_weight_and_gives_the_same_logits(tokenizer, tmp_path):
    """New random weights compare training and transformers independently of the committed model."""
    torch.manual_seed(1)
    model = SampleModel(SMALL)
    for router in model.routers():
        router.e_score_correction_bias.normal_(std=0.1)
    save_file(published_weights(model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config_json(SMALL)))
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(name.startswith("model.layers.2.") for name in info["unexpected_keys"])  # the MTP layer

    maker = BatchMaker(tokenizer, seed=0)
    batch = maker.pack({"date": [[draw_example("date", random.Random(0), held_out=True)]]})
    with torch.no_grad():
        ours = predict(model, batch, torch.float32).next_logits
        expected = theirs(batch.tokens[None]).logits[0, batch.places]
    assert (ours - expected).abs().max() < TOLERANCE["float32"]


def test_the_sample_model_loads_without_missing_or_unknown_weights():
    _, info = AutoModelForCausalLM.from_pretrained(SAMPLE_MODEL, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(name.startswith("model.layers.4.") for name in info["unexpected_keys"])  # the MTP layer


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=[pytest.mark.all] * (place > 0)) for place, task in enumerate(GENERATORS)]
)
def test_transformers_gives_the_same_greedy_text(outputs, task):
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    model = AutoModelForCausalLM.from_pretrained(SAMPLE_MODEL, dtype=torch.float32)
    prompts = ds.dataset(SAMPLE_PROMPTS).to_table().to_pylist()
    pairs = [pair for pair in zip(prompts, outputs("float32"), strict=True) if pair[0]["task"] == task]
    for prompt, output in [pair for pair in pairs if pair[1]["status"] == "ok"][:4]:
        (ids,) = tokenizer.encode_chats([prompt["messages"]])
        generated = model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)[0, len(ids) :]
        assert generated.tolist() == output["token_ids"]


# ---- the answers


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_sample_model_answers_held_out_prompts(outputs, dtype):
    right = right_of(outputs(dtype))
    assert set(right) == set(GENERATORS)
    assert sum(map(sum, right.values())) / sum(map(len, right.values())) >= MIN_ACCURACY
    for task, answers in right.items():
        assert sum(answers) / len(answers) >= MIN_TASK_ACCURACY, task


def test_the_layer_for_multi_token_prediction_knows_the_second_token():
    maker = BatchMaker(Tokenizer.from_file(str(SAMPLE_MODEL / "tokenizer.json")), seed=0)
    verdict = evaluate(read_published(SAMPLE_MODEL), maker, num_rows=20, seed=2, dtype=torch.bfloat16)
    assert verdict.acceptance >= MIN_ACCEPTANCE
    assert verdict.overall >= MIN_TASK_ACCURACY


@pytest.mark.all  # make test: answers to held-out prompts, above
def test_both_precisions_are_equally_good(outputs):
    shares = []
    for dtype in ("bfloat16", "float32"):
        answers = [answer for task in right_of(outputs(dtype)).values() for answer in task]
        shares.append(sum(answers) / len(answers))
    assert abs(shares[0] - shares[1]) <= 0.01


def test_the_card_names_the_committed_weights():
    digest = hashlib.sha256((SAMPLE_MODEL / "model.safetensors").read_bytes()).hexdigest()
    card = (SAMPLE_MODEL / "README.md").read_text()
    assert digest in card
    assert "sample_data/train/train.py" in card


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """The run folder of the demo: two ranks."""
    run = tmp_path_factory.mktemp("demo") / "run"
    ended = batchinfer("run", DEMO_JOB, "--set", f"output.dir={run}")
    assert ended.code == 3, ended.err
    return run


@pytest.mark.all  # make test: test_balanced_run
def test_the_demo_decodes_on_both_ranks_alike_in_the_steps_that_run(demo):
    """Some 25 steps, in which whole prompt groups end at once; alone, the plan's deal leaves 1.4 times the mean."""
    report = json.loads(batchinfer("report", demo, "--json").out)
    assert report["decode_kv_max_over_mean"] <= 1.2
    assert report["decode_requests_max_over_mean"] <= 1.2
    balance = report["predictions"]["decode_balance"]
    print(f"planned {balance['planned']:.3f}, happened {balance['happened']:.3f}")
    assert balance["planned"] == pytest.approx(balance["happened"], rel=0.1)
