"""The keys of a job file in generated files: docs/job-keys.md, and the JSON schema that editors read.

Run `PYTHONPATH=tests python -m support.job_keys_page` to write both again after a key or its description changed.
"""

import json
from pathlib import Path

from pydantic import BaseModel

from batchinfer.config import JobConfig
from batchinfer.plan.first_job import SCHEMA
from batchinfer.schema import job_json_schema, type_and_default

PAGE = Path(__file__).parents[2] / "docs" / "job-keys.md"
HEAD = """\
# All keys of a job file

Generated from the definitions that `batchinfer schema` prints. [jobs.md](jobs.md) explains the keys, task by task.
Keys without a default are required. Unknown keys are errors. `--set part.key=value` overrides a key.
"""


def page_text() -> str:
    """Return the page: a heading and a table for each part of the job file."""
    blocks = [HEAD]
    for name, field in JobConfig.model_fields.items():
        part = field.annotation
        assert isinstance(part, type)
        assert issubclass(part, BaseModel)
        rows = [
            f"| `{key}` | {escaped(type_and_default(info))} | {escaped(info.description or '')} |"
            for key, info in part.model_fields.items()
        ]
        table = "\n".join(["| key | type, default | meaning |", "|---|---|---|", *rows])
        blocks.append(f"## {name}\n\n{(part.__doc__ or '').strip()}\n\n{table}\n")
    return "\n".join(blocks)


def schema_text() -> str:
    """Return the JSON schema of a job file, as `batchinfer schema --json` prints it."""
    return json.dumps(job_json_schema(), indent=1) + "\n"


def escaped(text: str) -> str:
    """Return `text` with the signs that end a cell or begin a tag escaped."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page_text())
    SCHEMA.write_text(schema_text())
