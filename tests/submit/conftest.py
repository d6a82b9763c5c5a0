"""Ranks that take their time, so that a run has a middle in which it can be disturbed."""

import os
from collections.abc import Callable

import pytest

# In the ranks only, which find it by PYTHONPATH.
SLOW = """
import os, time
if "BATCHINFER_RANK_NUMBER" in os.environ:
    from batchinfer.rank import prefill
    plain = prefill.Prefill._run
    def slow(self, *arguments, **options):
        time.sleep(float(os.environ["STEP_S"]))
        return plain(self, *arguments, **options)
    prefill.Prefill._run = slow
"""


@pytest.fixture
def slow_steps(tmp_path, monkeypatch) -> Callable[[float], None]:
    """Has ranks that are started from now on lose seconds with each prefill step."""

    def set_up(step_s: float) -> None:
        folder = tmp_path / "slow"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SLOW)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        monkeypatch.setenv("STEP_S", str(step_s))

    return set_up
