"""The digest of the sources that decide a model's bits."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from batchinfer.model_code import model_code

PACKAGES = {name: Path(find_spec(name).origin).parent for name in ("batchinfer", "batchinfer_kernels")}
ASK = "from batchinfer.model_code import model_code; print(model_code())"


def code_of(folder: Path) -> str:
    """Return the digest of the packages in a folder."""
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, sys.argv[1]); {ASK}", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    for name, source in PACKAGES.items():
        shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert code_of(tmp_path) == model_code()
    return tmp_path


@pytest.mark.parametrize(
    ("file", "is_told"),
    [
        ("batchinfer/model/moe.py", True),
        ("batchinfer/parallel/mesh.py", True),
        ("batchinfer_kernels/registry.py", True),
        ("batchinfer/report/read.py", False),
    ],
)
def test_code_that_decides_bits_is_told_apart_and_other_code_is_not(checkout, file, is_told):
    source = checkout / file
    source.write_text(source.read_text() + "# changed\n")
    assert (code_of(checkout) != model_code()) == is_told


def test_a_file_under_another_name_is_told_apart(checkout):
    (checkout / "batchinfer/model/moe.py").rename(checkout / "batchinfer/model/mixture.py")
    assert code_of(checkout) != model_code()
