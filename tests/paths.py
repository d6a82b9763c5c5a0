"""Where the sample data is."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
SAMPLE_MODEL = ROOT / "sample_data" / "model"
SAMPLE_PROMPTS = ROOT / "sample_data" / "prompts"
DEMO_JOB = ROOT / "jobs" / "demo.toml"
