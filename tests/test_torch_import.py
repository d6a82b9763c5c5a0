"""Ranks import torch without what only compilers and training use; whoever uses it gets it all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from batchinfer.engine.torch_import import PUT_OFF

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
