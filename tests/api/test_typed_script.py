"""A type checker finds the mistakes in a user's script, and nothing else."""

import re
from pathlib import Path

import pytest

from support.paths import ROOT

SCRIPT = Path(__file__).with_name("typed_script.py")


@pytest.mark.all  # half a minute for the first time; make test: types equal to the schema, in test_call_settings
def test_mypy_finds_the_mistakes_in_a_script_and_knows_the_types_of_answers(monkeypatch):
    api = pytest.importorskip("mypy.api", reason="mypy is not installed; it comes with pip install batchinfer[lint]")
    monkeypatch.setenv("MYPYPATH", f"{ROOT}:{ROOT / 'kernels'}")
    monkeypatch.chdir(ROOT)
    # as in a user's project: no settings, and errors in libraries are not reported
    options = ["--config-file=", "--cache-dir=.mypy_cache/typed_script", "--strict", "--follow-imports=silent"]
    said, failure, _ = api.run([*options, str(SCRIPT)])
    assert failure == ""
    found = re.findall(r"^.*typed_script\.py:(\d+): error: .* \[([a-z-]+)\]$", said, re.MULTILINE)
    types = re.findall(r'^.*typed_script\.py:(\d+): note: Revealed type is "(.*)"$', said, re.MULTILINE)
    revealed = {int(line): re.sub(r"\b[a-z.]+\.(?=[A-Z])", "", kind) for line, kind in types}
    lines = list(enumerate(SCRIPT.read_text().splitlines(), 1))
    mistakes = {number: line.partition("# mistake: ")[2] for number, line in lines if "# mistake: " in line}
    reveals = {number: line.partition("# reveals: ")[2] for number, line in lines if "# reveals: " in line}
    assert len(mistakes) > 10
    assert {(int(line), code) for line, code in found} == set(mistakes.items())
    assert revealed == reveals
