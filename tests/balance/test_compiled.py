"""Machine code of the balancers is kept only in folders that this user alone can write, and is not needed."""

import os
import resource
import subprocess
import sys
from functools import partial

import pytest

from support.tiers import first_in_make_test

SOURCE = """
from batchinfer.balance.compiled import compiled

@compiled
def plus_one(x):
    return x + 1

assert plus_one(1) == 2
print(plus_one.stats.cache_path)
"""


def kept_in(tmp_path, preexec_fn=None):
    """Return where a process kept the code of a function, and its stderr."""
    script = tmp_path / "source" / "script.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(SOURCE)
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, script]
    ended = subprocess.run(command, env=variables, preexec_fn=preexec_fn, capture_output=True, text=True, check=True)
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


@pytest.mark.parametrize("kind", first_in_make_test(["nbi", "nbc"]))
@pytest.mark.parametrize("num_bytes", [0, 100])
def test_a_damaged_file_of_code_is_written_again(tmp_path, kind, num_bytes):
    folder, _ = kept_in(tmp_path)
    (file,) = (tmp_path / "cache").rglob(f"*.{kind}")
    whole = file.stat().st_size
    os.truncate(file, num_bytes)
    assert kept_in(tmp_path) == (folder, "")
    assert file.stat().st_size == whole


def test_code_that_cannot_be_written_is_compiled_each_time(tmp_path):
    full_disk = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (10, 10))  # bytes of a file
    _, said = kept_in(tmp_path, full_disk)
    assert said == ""
    assert list((tmp_path / "cache").rglob("*.nb*")) == []
