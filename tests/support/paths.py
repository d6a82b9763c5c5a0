"""Paths of the sample data, and of a model with random weights for tests that want noise instead of answers."""

import os
import shutil
import tempfile
from atexit import register
from pathlib import Path

from support.random_model import make_random_twin

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
SAMPLE_MODEL = ROOT / "sample_data" / "model"
SAMPLE_PROMPTS = ROOT / "sample_data" / "prompts"
DEMO_JOB = ROOT / "jobs" / "demo.toml"

_MADE = "BATCHINFER_TESTS_RANDOM_MODEL"  # by the process that has started this one, which may be killed any time


def _random_model() -> Path:
    if made := os.environ.get(_MADE):
        return Path(made)
    scratch = Path(tempfile.mkdtemp(prefix="batchinfer-tests-"))
    register(shutil.rmtree, scratch, ignore_errors=True)
    model = make_random_twin(SAMPLE_MODEL, scratch / "model")
    os.environ[_MADE] = str(model)
    return model


RANDOM_MODEL = _random_model()
