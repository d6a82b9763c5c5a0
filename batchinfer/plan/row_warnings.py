"""Warnings about the rows of all shards, each written once after all rows were read."""

from collections import Counter
from dataclasses import dataclass, field

from batchinfer.config import JobConfig
from batchinfer.data.validate import ShardRows
from batchinfer.plan.inputs import warn_of_tools
from batchinfer.progress import note
from batchinfer.records import Shard


@dataclass(slots=True)
class RowWarnings:
    """Counts over the good rows of shards."""

    num_capped: int = 0  # max_tokens cut to the model's window
    num_unwritten_tools: int = 0  # with tools that the chat template does not write
    lost_null: str | None = None  # the first null of a tool that prompts leave out, with its row and shard
    structured: Counter[str] = field(default_factory=Counter)  # rows by sentence about their structured outputs

    def add(self, shard: Shard, found: ShardRows) -> None:
        """Add what was found in a shard."""
        self.num_capped += found.num_capped
        self.num_unwritten_tools += found.num_unwritten_tools
        self.structured.update(found.warnings)
        if found.lost_null is not None and self.lost_null is None:
            self.lost_null = f"{found.lost_null} of {shard.path}"

    def write(self, job: JobConfig, window: int) -> None:
        """Write the warnings.

        Args:
            window: most tokens of the model.
        """
        if self.num_unwritten_tools:
            warn_of_tools(job)
        if self.lost_null:
            note(
                f"warning: column {job.input.tools!r} has null as {self.lost_null}; in structs, null values and "
                "missing fields look the same, so prompts leave both out; give tools as JSON text to keep nulls"
            )
        for sentence, num_rows in self.structured.items():
            what = "row" if num_rows == 1 else "rows"
            note(f"warning: structured_outputs of {num_rows:,} {what}: {sentence}")
        if self.num_capped:
            note(
                f"warning: {self.num_capped:,} rows leave less room than max_tokens in the window of {window:,} tokens"
            )
