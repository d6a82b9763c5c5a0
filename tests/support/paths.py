"""Where the sample data is, and a model with random weights for tests that want noise instead of answers."""

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

_SCRATCH = Path(tempfile.mkdtemp(prefix="batchinfer-tests-"))
register(shutil.rmtree, _SCRATCH, ignore_errors=True)
RANDOM_MODEL = make_random_twin(SAMPLE_MODEL, _SCRATCH / "model")
