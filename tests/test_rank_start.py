"""How ranks are started: with which settings, and with a torch that leaves out what nobody uses, until somebody does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer.engine.torch_import import PUT_OFF
from jobs import start, write_job, write_questions

START = "import sys; from batchinfer.engine.torch_import import put_off_compilers; put_off_compilers(); import torch; "


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", START + code], check=True, capture_output=True, text=True).stdout


def test_a_rank_never_executes_what_was_put_off():
    code = "import batchinfer.engine.rank; print([type(sys.modules[n]).__name__ for n in sys.argv[1:]])"
    program = [sys.executable, "-c", START + code, *PUT_OFF]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str(["_LateModule"] * len(PUT_OFF))


@pytest.mark.parametrize(
    ("use", "prints"),
    [
        (
            "torch._meta_registrations.meta_mm; a = torch.ones(2, 3, device='meta'); print(a @ a.T)",
            "tensor(..., device='meta', size=(2, 2))",
        ),
        ("print(float(torch.distributions.Normal(0.0, 1.0).mean))", "0.0"),
        ("print(callable(torch.export.export))", "True"),
        ("from torch.quantization import QConfig; print(QConfig.__name__)", "QConfig"),
        ("print(hasattr(torch.export, 'no such name'))", "False"),
    ],
)
def test_what_was_put_off_is_whole_when_it_is_used(use, prints):
    assert run(use).strip() == prints


def test_a_product_has_its_bits_without_them():
    code = "torch.manual_seed(0); print(torch.nn.functional.linear(torch.randn(4, 8), torch.randn(3, 8)).sum().item())"
    plain = [sys.executable, "-c", f"import torch; {code}"]
    assert run(code) == subprocess.run(plain, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(("num_ranks", "own", "spins"), [(1, None, "30000"), (2, None, "1000"), (1, "77", "77")])
def test_threads_of_a_lone_rank_stay_awake_for_a_moment_unless_the_user_wants_it_otherwise(
    tmp_path, monkeypatch, num_ranks, own, spins
):
    trap = "import os, pathlib\nif 'BATCHINFER_RANK_NUMBER' in os.environ: pathlib.Path(os.environ['SEEN']).write_text("
    (tmp_path / "sitecustomize.py").write_text(f"{trap}os.environ['GOMP_SPINCOUNT'])")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.delenv("GOMP_SPINCOUNT")
    if own is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", own)
    write_questions(tmp_path / "prompts", (3,))
    process = start("run", write_job(tmp_path, cluster={"decode_ranks": num_ranks}))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert Path(tmp_path / "seen").read_text() == spins
