"""The examples of docs/python.md in pipelines of others, where they are installed: ray[data] and datatrove."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pyarrow.dataset as ds
import pytest

import batchinfer
from support.paths import ROOT, SAMPLE_MODEL

pytestmark = pytest.mark.all  # needs libraries of others; make test: calls of generate in test_generation


def run_example(library: str, folder: Path) -> None:
    """Run the example that imports this library, in an empty folder with the sample data and some texts."""
    if importlib.util.find_spec(library) is None:
        reason = f"THE EXAMPLE WITH {library} IS NOT TESTED: it is not installed"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    blocks = re.findall(r"```python\n(import .*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    (example,) = (block for block in blocks if re.search(rf"^(import|from) {library}\b", block, re.MULTILINE))
    (folder / "sample_data").symlink_to(ROOT / "sample_data")
    (folder / "texts").mkdir()
    texts = [{"id": f"t{number}", "text": f"The ferry {number}"} for number in range(9)]
    (folder / "texts" / "a.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    (folder / "example.py").write_text(example)
    ended = subprocess.run([sys.executable, "example.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_ray_data_maps_batches_with_a_model(tmp_path):
    run_example("ray", tmp_path)
    rows = ds.dataset(tmp_path / "runs" / "ray").to_table()
    assert rows.num_rows == 324
    assert rows["status"].to_pylist().count("ok") == 318


def test_a_task_of_ray_generates(tmp_path):
    """The test runs in a separate process, because a Ray cluster leaves threads and settings behind."""
    pytest.importorskip("ray")
    code = (
        "import json, ray, batchinfer\n"
        "ray.init(num_cpus=1, include_dashboard=False)\n"
        "@ray.remote\n"
        "def answers(texts, **settings):\n"
        "    return batchinfer.generate(texts, **settings)['text'].to_pylist()\n"
        f"settings = dict(model={str(SAMPLE_MODEL)!r}, dtype='float32', max_tokens=8)\n"
        "texts = ['The ferry', 'The baker']\n"
        "print(json.dumps([ray.get(answers.remote(texts, **settings)), answers._function(texts, **settings)]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    of_task, here = json.loads(ended.stdout.splitlines()[-1])
    assert of_task == here
    assert all(of_task)


def test_datatrove_has_a_step_with_a_model(tmp_path):
    run_example("datatrove", tmp_path)
    (file,) = (tmp_path / "runs" / "datatrove").glob("*.jsonl.gz")
    documents = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert [document["id"] for document in documents] == [f"t{number}" for number in range(9)]
    expected = batchinfer.generate(
        [document["text"] for document in documents], model=SAMPLE_MODEL, dtype="float32", max_tokens=16
    )
    assert [document["metadata"]["answer"] for document in documents] == expected["text"].to_pylist()
