"""docs/job-keys.md: the keys of a job file as tables, from the definitions that `batchinfer schema` prints.

Run `PYTHONPATH=tests python -m support.job_keys_page` to write the page again after a key or its description changed.
"""

from pathlib import Path

from pydantic import BaseModel

from batchinfer.config import JobConfig
from batchinfer.schema import type_and_default

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


def escaped(text: str) -> str:
    """Return `text` with the signs that end a cell or begin a tag escaped."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page_text())
