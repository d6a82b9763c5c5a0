"""lm-evaluation-harness through batchinfer: the same figures as by its own `hf` backend, on local tasks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from importlib import import_module
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchinfer.records import BatchinferError, ConfigError, ModelError
from support.jobs import batchinfer
from support.paths import ROOT, SAMPLE_MODEL, SAMPLE_PROMPTS
from support.scripted_model import THINKING, write_scripted_model

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from batchinfer.lm_eval import BatchinferLM, main

TOLERANCE = 1e-4  # of log-probabilities of texts, in float32
MOST_TOKENS = 2047
TASKS = {
    "sums": """
output_type: generate_until
doc_to_target: "{{expected}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "sums_to_choose": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 2
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
}


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    """The two tasks over the same sums of the sample prompts."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = pq.read_table(SAMPLE_PROMPTS / "part-00000.parquet").to_pylist()
    sums = [row for row in rows if row["task"] == "total" and len(row["messages"]) == 2][:6]
    with open(folder / "sums.jsonl", "w") as file:
        for row in sums:
            crowns = int(row["expected"].split()[0])
            choices = [f"{crowns + 1} crowns", "no", row["expected"], f"{crowns} crowns, and the clerk adds them again"]
            doc = {"question": row["messages"][1]["content"], "expected": row["expected"], "choices": choices}
            file.write(json.dumps(doc) + "\n")
    for name, parts in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\n{parts}"
            f"description: {json.dumps(sums[0]['messages'][0]['content'])}\n"
            f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'sums.jsonl'}}}, "
            f"cache_dir: {folder / 'cache'}}}\n"
            'test_split: test\nnum_fewshot: 0\ndoc_to_text: "{{question}}"\nmetadata: {version: 1}\n'
        )
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    work_dir = tmp_path_factory.mktemp("work")
    return BatchinferLM(str(SAMPLE_MODEL), work_dir=str(work_dir), max_length=MOST_TOKENS, dtype="float32")


@pytest.fixture(scope="module")
def theirs():
    return HFLM(str(SAMPLE_MODEL), dtype="float32", device="cpu", max_length=MOST_TOKENS, batch_size=2)


@pytest.fixture(scope="module")
def thinks(tmp_path_factory):
    """A model that says "first step\\n\\nsecond </think>answer\\n\\nmore", and its tokens' ids."""
    folder = tmp_path_factory.mktemp("thinking")
    ids = write_scripted_model(folder / "model", THINKING)
    model = BatchinferLM(str(folder / "model"), dtype="float32", **{"output.reasoning": "auto"})
    return model, ids


def request(kind: str, *arguments) -> Instance:
    return Instance(kind, {}, arguments, 0)


def evaluated(model, folder: Path) -> tuple[dict, dict[str, list]]:
    """(figures, answers of the model to each document) by task."""
    found = simple_evaluate(
        model,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    answers = {
        task: [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in found["samples"].items()
    }
    return found["results"], answers


def test_tasks_have_the_figures_of_the_hf_backend(ours, theirs, task_folder):
    (figures, answers), (expected, expected_answers) = (evaluated(model, task_folder) for model in (ours, theirs))
    for task, names in {"sums": ["exact_match,none"], "sums_to_choose": ["acc,none", "acc_norm,none"]}.items():
        assert {name: figures[task][name] for name in names} == {name: expected[task][name] for name in names}
    assert figures["sums"]["exact_match,none"] == 1.0
    assert figures["sums_to_choose"]["acc,none"] > 0.5
    assert answers["sums"] == expected_answers["sums"]
    for found, wanted in zip(answers["sums_to_choose"], expected_answers["sums_to_choose"], strict=True):
        assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in wanted], abs=TOLERANCE)
        assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]


@pytest.mark.all  # make test: figures of tasks, above
@pytest.mark.parametrize("is_question", [True, False])
def test_chats_have_the_text_of_the_hf_backend(ours, theirs, is_question):
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 and 2?"}]
    chat += [] if is_question else [{"role": "assistant", "content": "The sum is"}]
    text = ours.apply_chat_template(chat, add_generation_prompt=is_question)
    assert text == theirs.apply_chat_template(chat, add_generation_prompt=is_question)
    assert ours.tok_encode(text) == theirs.tok_encode(text)
    assert ours.chat_template(True) == theirs.chat_template(True)


def test_a_model_may_be_named_as_in_the_cache(tmp_path, monkeypatch):
    folder = tmp_path / "models--acme--tiny" / "snapshots" / "abc"
    shutil.copytree(SAMPLE_MODEL, folder)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert BatchinferLM("acme/tiny").tokenizer_name == str(folder).replace("/", "__")
    with pytest.raises(ModelError, match=r"no model folder .*acme/large"):
        BatchinferLM("acme/large")


def test_chats_get_the_variables_of_the_arguments(tmp_path):
    shutil.copytree(SAMPLE_MODEL, tmp_path / "model")
    template = (
        "{{ strftime_now('%d %b %Y') }} {{ messages[-1].content }}{% if not enable_thinking %}</think>{% endif %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "content": "Well?"}]
    with pytest.raises(BatchinferError, match=r"a chat of the task cannot be used: .* asks for today's date"):
        BatchinferLM(str(tmp_path / "model")).apply_chat_template(chat)
    given = {"strftime_now": "2026-01-31", "enable_thinking": False}
    for variables in (given, json.dumps(given)):
        model = BatchinferLM(str(tmp_path / "model"), **{"input.chat_template_kwargs": variables})
        assert model.apply_chat_template(chat) == "31 Jan 2026 Well?</think>"
    for wrong, why in {"enable_thinking": "not a table such as", '{"strftime_now": "now"}': "which is no date"}.items():
        with pytest.raises(ConfigError, match=rf"model_args: input.chat_template_kwargs .*{why}"):
            BatchinferLM(str(tmp_path / "model"), **{"input.chat_template_kwargs": wrong})


@pytest.mark.all  # make test: figures of tasks, above
def test_continuations_of_one_context_are_one_row(ours, theirs, tmp_path):
    pairs = [("The sum is", " 42 crowns"), ("", "Esther paid"), ("The sum is ", "41"), ("Ten and", " two")]
    pairs += [("The sum is", " 9"), ("long " * 3000, " end")]
    requests = [request("loglikelihood", *pair) for pair in pairs]
    before = set(ours.jobs.folder.iterdir())
    found, expected = (model.loglikelihood(requests, disable_tqdm=True) for model in (ours, theirs))
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in expected], abs=TOLERANCE)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    (folder,) = set(ours.jobs.folder.iterdir()) - before
    rows = pq.read_table(folder / "prompts.parquet").to_pylist()
    assert sorted(len(row["choices"]) for row in rows) == [1, 1, 1, 3]
    assert max(len(row["prompt"]) for row in rows) == MOST_TOKENS + 1 - len(rows[-1]["choices"][0])


@pytest.mark.all  # make test: figures of tasks, above
def test_a_context_of_many_continuations_is_several_rows(ours):
    requests = [request("loglikelihood", "The sum is", f" {number}") for number in range(150)]
    before = set(ours.jobs.folder.iterdir())
    found = ours.loglikelihood(requests, disable_tqdm=True)
    (folder,) = set(ours.jobs.folder.iterdir()) - before
    assert [len(row["choices"]) for row in pq.read_table(folder / "prompts.parquet").to_pylist()] == [64, 64, 22]
    alone = [ours.loglikelihood([requests[place]], disable_tqdm=True)[0][0] for place in (0, 149)]
    assert [found[0][0], found[149][0]] == pytest.approx(alone, abs=TOLERANCE)


@pytest.mark.all  # make test: figures of tasks, above
def test_whole_texts_are_scored_in_windows(tmp_path, theirs):
    ours = BatchinferLM(str(SAMPLE_MODEL), work_dir=str(tmp_path), max_length=20, dtype="float32")
    requests = [request("loglikelihood_rolling", text) for text in ("Esther paid 38 crowns. " * 12, "Short.", "")]
    theirs._max_length, before = 20, theirs._max_length
    expected = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    theirs._max_length = before
    found = ours.loglikelihood_rolling(requests)
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert len(ours.tok_encode(requests[0].args[0])) > 3 * 20


@pytest.mark.all  # make test: figures of tasks, above
def test_each_request_is_generated_as_its_task_asks(ours, theirs):
    wanted = [
        {"until": ["crowns"], "max_gen_toks": 20},
        {"until": " ", "max_gen_toks": 3, "do_sample": False, "temperature": 0.7},
        {"until": ["<｜end▁of▁sentence｜>", "<｜User｜>"], "max_new_tokens": 30},
        {"until": [], "max_gen_toks": 2040},
    ]
    contexts = ["Esther paid 38 crowns, Farid", "The ferry", "<｜begin▁of▁sentence｜><｜User｜>Hello", "long " * 900]
    requests = [request("generate_until", *pair) for pair in zip(contexts, wanted, strict=True)]
    assert ours.generate_until(requests) == theirs.generate_until(requests, disable_tqdm=True)


@pytest.mark.all  # make test: figures of tasks, above
def test_cut_contexts_are_told(ours, capsys):
    long, short = "long " * 3000, "The ferry"
    few = {"until": ["\n"], "max_gen_toks": 2}
    ours.generate_until([request("generate_until", context, few) for context in (long, short, long + short)])
    assert "warning: 2 contexts are cut at their beginning to fit max_length = 2,047" in capsys.readouterr().err
    ours.loglikelihood([request("loglikelihood", long, " end")], disable_tqdm=True)
    assert "warning: 1 context is cut at its beginning" in capsys.readouterr().err


@pytest.mark.all  # make test: figures of tasks, above
def test_a_cut_context_scores_its_continuation_alone(theirs, tmp_path):
    context, continuation = list(range(100, 110)), [110, 111]
    cut = BatchinferLM(str(SAMPLE_MODEL), work_dir=str(tmp_path), max_length=5, dtype="float32")
    ((found, _),) = cut._loglikelihood_tokens([(("", ""), context, continuation)])
    ((expected, _),) = theirs._loglikelihood_tokens([(("", ""), context[-4:], continuation)], disable_tqdm=True)
    assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.all  # make test: figures of tasks, above
def test_stops_of_a_task_count_behind_the_thinking_and_each_task_has_its_own(thinks, tmp_path):
    model, _ = thinks
    (tmp_path / "docs.jsonl").write_text(json.dumps({"question": "Well?"}) + "\n")
    for name, more in {"default": "", "own": 'generation_kwargs: {until: ["re"], do_sample: false}\n'}.items():
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\noutput_type: generate_until\n{more}dataset_path: json\n"
            f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'docs.jsonl'}}}, cache_dir: {tmp_path / 'cache'}}}\n"
            'test_split: test\nnum_fewshot: 0\ndoc_to_text: "{{question}}"\ndoc_to_target: answer\n'
            "metric_list: [{metric: exact_match}]\nmetadata: {version: 1}\n"
        )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = simple_evaluate(
        model, tasks=["default", "own"], task_manager=manager, apply_chat_template=True, bootstrap_iters=0
    )
    answers = {name: sample["resps"] for name, (sample,) in found["samples"].items()}
    assert answers == {"default": [["answer"]], "own": [["answer\n\nmo"]]}
    assert found["results"]["default"]["exact_match,none"] == 1.0


@pytest.mark.all  # make test: figures of tasks, above
def test_answers_that_were_cut_or_ended_in_their_thinking_are_told(thinks, capsys):
    model, ids = thinks
    prompt = model.apply_chat_template([{"role": "user", "content": "Well?"}])
    ways = [
        {"until": ["\n\n"]},
        {"until": ["\n\n"], "max_gen_toks": 3},
        {"until": [], "max_gen_toks": 5},
        {"until": [], "stop_token_ids": [ids["second "]]},
    ]
    ways = [{"stop_token_ids": [ids["</s>"]]} | way for way in ways]
    answers = model.generate_until([request("generate_until", prompt, way) for way in ways])
    assert answers == ["answer", "", "answer\n\n", ""]
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert told == [
        "warning: 2 of 4 answers were cut at max_gen_toks, 1 of them in their thinking, so that they are empty; "
        "raise max_gen_toks",
        "warning: 1 of 4 answers ended in their thinking, so that they are empty",
    ]


@pytest.mark.all  # make test: figures of tasks, above
def test_sampling_of_a_task_reaches_its_row(ours):
    how = {"until": ["\n"], "max_gen_toks": 4, "do_sample": True, "temperature": 0.5, "top_p": 0.9, "seed": 3}
    before = set(ours.jobs.folder.iterdir())
    ours.generate_until([request("generate_until", "The ferry", how)] * 2)
    (folder,) = set(ours.jobs.folder.iterdir()) - before
    row = pq.read_table(folder / "prompts.parquet").to_pylist()[1]["sampling"]
    expected = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["\n"], "stop_token_ids": [1]}
    assert row == expected


def test_what_cannot_work_is_one_sentence(ours, tmp_path):
    with pytest.raises(ConfigError, match=r"pretrained is no model argument of batchinfer; use path, dtype"):
        BatchinferLM(str(SAMPLE_MODEL), pretrained="x")
    with pytest.raises(ConfigError, match=r"max_length is 0, but it should be a whole number above 0"):
        BatchinferLM(str(SAMPLE_MODEL), max_length=0)
    with pytest.raises(BatchinferError, match=r"generation_kwargs of the task has num_beams, which is not known"):
        ours.generate_until([request("generate_until", "Hello", {"until": [], "num_beams": 4})])
    with pytest.raises(BatchinferError, match=r"max_gen_toks is 4000, which leaves no room in max_length = 2047"):
        ours.generate_until([request("generate_until", "Hello", {"until": [], "max_gen_toks": 4000})])
    with pytest.raises(BatchinferError, match=r"a continuation of 0 tokens cannot be scored"):
        ours.loglikelihood([request("loglikelihood", "Hello", "")], disable_tqdm=True)
    with pytest.raises(BatchinferError, match=r"request 0 of .* failed: sampling.top_p is 7.0, but it should be less"):
        ours.generate_until([request("generate_until", "Hello", {"until": [], "max_gen_toks": 4, "top_p": 7.0})])
    wrong = BatchinferLM(str(SAMPLE_MODEL), work_dir=str(tmp_path), **{"cluster.prefill_ranks": 0})
    with pytest.raises(ConfigError, match=r"model_args: cluster.prefill_ranks is 0, but it should be greater"):
        wrong.loglikelihood([request("loglikelihood", "a", " b")], disable_tqdm=True)
    other = BatchinferLM(str(SAMPLE_MODEL), work_dir=str(tmp_path), **{"cluster.backend": "hopper"})
    with pytest.raises(
        BatchinferError, match=r"batchinfer run .*job.toml ended with exit code 2; its messages are above"
    ) as failed:
        other.loglikelihood([request("loglikelihood", "a", " b")], disable_tqdm=True)
    assert failed.value.exit_code == 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "model_args has no path; write --model_args path=DIR, the model's folder"),
        ({"path": 5}, "path is 5, not text; write a folder with such a name as path=./NAME"),
        ({"path": str(SAMPLE_MODEL), "dtpe": "fp8"}, "dtpe is no model argument of batchinfer; use path, dtype"),
        ({"path": "/nowhere"}, "there is no model folder /nowhere; give the path of one"),
        ({"path": str(SAMPLE_MODEL), "work_dir": "/proc/x"}, "work_dir cannot be used: "),
        ({"model": "batchinfr"}, "Attempted to load model 'batchinfr'"),
    ],
)
def test_wrong_arguments_of_the_command_are_one_sentence(monkeypatch, capsys, wrong, why):
    def evaluate() -> None:
        model = get_model(wrong.pop("model", "batchinfer")).create_from_arg_obj(wrong)
        model.loglikelihood([request("loglikelihood", "a", " b")], disable_tqdm=True)

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", evaluate)  # the command takes 10 s to list its tasks
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {why}")
    assert said.count("\n") == 1


def test_an_interrupt_of_the_imports_is_one_sentence():
    command = [sys.executable, "-X", "importtime", "-m", "batchinfer.lm_eval", "run", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        while "| pyarrow" not in ran.stderr.readline():
            assert ran.poll() is None
        ran.send_signal(signal.SIGINT)
        _, said = ran.communicate(timeout=60)
    assert ran.returncode == 75
    lines = [line for line in said.splitlines() if not line.startswith("import time:")]
    assert lines == ["stopped by SIGINT; run the same command to go on"]


LONG_JOB = """
import sys
import lm_eval.__main__
from lm_eval.api.instance import Instance
from batchinfer.lm_eval import BatchinferLM, main

def evaluate():
    model = BatchinferLM(sys.argv[1], work_dir=sys.argv[2], dtype="float32", **{"sampling.ignore_eos": True})
    long = {"until": [], "max_gen_toks": 1900}
    model.generate_until([Instance("generate_until", {}, (f"The ferry {place}", long), 0) for place in range(64)])

lm_eval.__main__.cli_evaluate = evaluate
main()
"""


@pytest.mark.parametrize("is_sent_to_all", [True, False], ids=["Ctrl-C", "one process"])
def test_an_interrupted_job_is_one_sentence_and_is_kept(tmp_path, is_sent_to_all):
    command = [sys.executable, "-c", LONG_JOB, str(SAMPLE_MODEL), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as ran:
        deadline_s = time.monotonic() + 120
        while not list(tmp_path.glob("*/run/units/*/[0-9]*/claim.json")):
            assert ran.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        (os.killpg if is_sent_to_all else os.kill)(ran.pid, signal.SIGINT)
        _, said = ran.communicate(timeout=60)
    assert ran.returncode == 75
    assert "Traceback" not in said
    *_, last = said.splitlines()
    assert last == "stopped by SIGINT; the same command goes on if --model_args has a work_dir, else it begins again"
    assert said.count("run the same command to go on") == 1  # so says the job, loading or computing: it was not killed
    (run,) = tmp_path.glob("*/run")
    with pytest.raises(ProcessLookupError):  # no process of the job is left
        os.killpg(ran.pid, 0)
    assert batchinfer("status", run).code == 0


@pytest.mark.all  # make test: figures of tasks, above
def test_the_command_takes_keys_of_the_job_file_and_goes_on_in_its_folder(task_folder, tmp_path):
    arguments = f"path={SAMPLE_MODEL},dtype=float32,cluster.prefill_ranks=2,work_dir={tmp_path / 'work'}"
    command = [sys.executable, "-m", "batchinfer.lm_eval", "run", "--model", "batchinfer", "--model_args", arguments]
    command += ["--tasks", "sums_to_choose", "--include_path", str(task_folder), "--output_path", str(tmp_path / "out")]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "LOGLEVEL": "ERROR"}
    )
    assert ended.returncode == 0, ended.stderr
    assert "acc_norm" in ended.stdout
    (result,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(result.read_text())["results"]["sums_to_choose"]["acc_norm,none"] >= 0
    (folder,) = (tmp_path / "work").iterdir()
    assert tomllib.loads((folder / "job.toml").read_text())["cluster"]["prefill_ranks"] == 2
    done = (folder / "run" / "outputs" / "prompts.parquet").stat().st_mtime_ns
    same = {"dtype": "float32", "cluster.prefill_ranks": 2, "work_dir": str(tmp_path / "work")}
    again = simple_evaluate(
        BatchinferLM(str(SAMPLE_MODEL), **same),
        tasks=["sums_to_choose"],
        task_manager=TaskManager(include_path=str(task_folder), include_defaults=False),
    )
    assert again["results"]["sums_to_choose"] == json.loads(result.read_text())["results"]["sums_to_choose"]
    assert [*(tmp_path / "work").iterdir()] == [folder]
    assert (folder / "run" / "outputs" / "prompts.parquet").stat().st_mtime_ns == done


def test_the_entry_point_names_the_class():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = table["project"]["entry-points"]["lm_eval.models"]["batchinfer"].partition(":")
    assert getattr(import_module(module), name) is BatchinferLM
