"""Machine code of the balancers is kept only where nobody else can have put some."""

import os
import subprocess
import sys

import pytest

SOURCE = """
from batchinfer.balance.compiled import compiled

@compiled
def plus_one(x):
    return x + 1

assert plus_one(1) == 2
print(plus_one.stats.cache_path)
"""


def kept_in(tmp_path):
    """Where a process kept the code of a function, and what it said."""
    script = tmp_path / "source" / "script.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(SOURCE)
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, script], env=variables, capture_output=True, text=True, check=True)
    return ended.stdout.strip(), ended.stderr


@pytest.mark.parametrize("spoil", ["every user", "another user"])
def test_code_is_not_taken_from_a_folder_that_others_may_write(tmp_path, spoil):
    folder, said = kept_in(tmp_path)
    assert folder.startswith(str(tmp_path / "cache"))
    assert said == ""
    if spoil == "every user":
        os.chmod(folder, 0o777)
    elif os.getuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        pytest.skip("NOT TESTED: only root can give a folder away")
    again, said = kept_in(tmp_path)
    assert again == "None"
    assert folder in said
    assert "choose another NUMBA_CACHE_DIR" in said
