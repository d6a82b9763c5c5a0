"""The files tokens/<shard>.parquet: written once, and used again by a plan that was interrupted or is repeated."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from batchinfer.checked_json import publish_json, read_json
from batchinfer.config import JobConfig
from batchinfer.data.column_checks import NO_IDS
from batchinfer.data.prompts import PromptLimits
from batchinfer.data.shards import with_content
from batchinfer.data.validate import ShardRows, rows_found, tokenize_shard
from batchinfer.manifest import Manifest
from batchinfer.plan.inputs import Prepared, warn_of_calls, warn_of_date, warn_of_tools
from batchinfer.progress import Progress, note
from batchinfer.records import DamagedFileError, InputError, Shard
from batchinfer.run.quarantine import set_aside
from batchinfer.rundir import RunDir, read_state
from batchinfer.sanitize import count_text
from batchinfer.whole_files import Publisher


def tokenize_shards(prepared: Prepared, shards: list[Shard], *, strict: bool) -> list[Shard]:
    """Write the token file of every readable shard that has none yet; return the shards.

    A shard found damaged while it is read is returned with a problem, or raises InputError if `strict`.
    """
    run, model = prepared.run, prepared.model
    limits = PromptLimits(window=model.max_positions, vocab_size=model.vocab_size)
    id_type = pa.type_for_alias(read_state(run)["id_type"])
    checked, warnings = [], RowWarnings()
    contents: dict[int, str] = {}
    with (
        Progress("tokenise", sum(shard.num_rows for shard in shards), "rows", phase="planning") as progress,
        Publisher(partial(_vouch_for_tokens, run, prepared.manifest, contents)) as publisher,
    ):
        for inspected in shards:
            shard = inspected
            if shard.problem is not None:
                progress.advance(shard.num_rows)
                checked.append(shard)
                continue
            target = run.tokens(shard.index)
            try:
                shard = with_content(inspected)
                contents[shard.index] = shard.content
                if (found := _found_before(prepared, shard)) is not None:
                    progress.advance(shard.num_rows)
                else:
                    earlier = prepared.earlier.of(shard)
                    found = tokenize_shard(
                        shard,
                        prepared.job,
                        prepared.encoders,
                        limits,
                        target,
                        progress.advance,
                        manifest=prepared.manifest,
                        known=None if earlier is None else earlier.take,
                        kept=prepared.kept,
                        id_type=id_type,
                        publisher=publisher,
                    )
            except InputError as error:
                if strict:
                    raise
                note(f"warning: {error}")
                problem = str(error).removeprefix(f"{shard.path} is ").removeprefix(f"{shard.path} ")
                checked.append(replace(shard, problem=problem))
                continue
            warnings.add(shard, found)
            if found.num_bad:
                note(f"warning: {count_text(found.num_bad, 'bad row')} in {shard.path}; the first: {found.first_error}")
            if found.num_bad and strict:
                publisher.wait()
                for file in (run.token_checksums(shard.index), target):  # so that a strict rerun finds the row again
                    file.unlink()
                raise InputError(f"{shard.path}: {found.first_error}; correct the row, or run without --strict")
            if found.id_missing and shard.num_rows and prepared.job.input.id != NO_IDS:
                note(f"warning: {shard.path} has no column {prepared.job.input.id!r}; its rows have null ids")
            checked.append(shard)
    warnings.write(prepared.job, limits.window, has_chat_template=prepared.encoders.has_chat_template)
    return checked


def _found_before(prepared: Prepared, shard: Shard) -> ShardRows | None:
    """Return the row counts of a token file that an interrupted plan completed for these bytes, else None.

    The file is added to the manifest of the present plan.
    """
    run = prepared.run
    if not run.token_checksums(shard.index).exists():
        return None
    path = run.tokens(shard.index)
    try:
        said = read_json(run.token_checksums(shard.index), "bytes", "xxh3")
        if said.get("content", "") != shard.content:
            return None
        manifest = Manifest(run.root, {f"tokens/{path.name}": {key: said[key] for key in ("bytes", "xxh3")}})
        manifest.check(path)
        found = rows_found(path, manifest)
    except DamagedFileError as error:
        note(f"warning: {error.path} is damaged ({error.reason}); {shard.path} is tokenised again")
        return None
    if found is not None:
        prepared.manifest.add(path, manifest[path])
    return found


def keep_sound_token_files(run: RunDir, manifest: Manifest, shards: list[Shard]) -> None:
    """Keep the sound token files for a plan that is made again; move damaged ones to quarantine."""
    contents = {shard.index: shard.content for shard in shards}
    for path in [run.tokens(shard.index) for shard in shards]:
        try:
            manifest.check(path)
        except DamagedFileError as error:
            set_aside(run, path, error.reason)
        else:
            _vouch_for_tokens(run, manifest, contents, path)


def _vouch_for_tokens(run: RunDir, manifest: Manifest, contents: Mapping[int, str], path: Path) -> None:
    """Write the checksums of a token file and its shard next to it, for as long as run.json does not have them."""
    shard = int(path.stem)
    publish_json(run.token_checksums(shard), {**manifest[path].as_json(), "content": contents[shard]})


@dataclass(slots=True)
class RowWarnings:
    """Counts over the good rows of all shards; each warning is written once, after all rows were read."""

    num_capped: int = 0  # max_tokens cut to the model's window
    num_plain: int = 0  # raw text without a control token
    num_double_bos: int = 0  # raw text with the BOS token that the tokenizer adds itself
    num_unwritten_tools: int = 0  # with tools that the chat template does not write
    num_unwritten_calls: int = 0  # with earlier tool calls that the chat template does not write
    num_dateless: int = 0  # chats of OpenAI's lines without the date that the chat template writes
    lost_null: str | None = None  # the first null of a tool that prompts leave out, with its row and shard
    lost_const: str | None = None  # the first null const that schemas of the sampling column leave out, likewise
    structured: Counter[str] = field(default_factory=Counter)  # rows by sentence about their structured outputs

    def add(self, shard: Shard, found: ShardRows) -> None:
        """Add what was found in a shard."""
        self.num_capped += found.num_capped
        self.num_plain += found.num_plain
        self.num_double_bos += found.num_double_bos
        self.num_unwritten_tools += found.num_unwritten_tools
        self.num_unwritten_calls += found.num_unwritten_calls
        self.num_dateless += found.num_dateless
        self.structured.update(found.warnings)
        if found.lost_null is not None and self.lost_null is None:
            self.lost_null = f"{found.lost_null} of {shard.path}"
        if found.lost_const is not None and self.lost_const is None:
            self.lost_const = f"{found.lost_const} of {shard.path}"

    def write(self, job: JobConfig, window: int, *, has_chat_template: bool) -> None:
        """Write the warnings.

        Args:
            window: most tokens of the model.
            has_chat_template: whether the model folder has a chat template.
        """
        if self.num_plain and has_chat_template and job.input.choices is None:
            what = "prompt is" if self.num_plain == 1 else "prompts are"
            column = json.dumps(job.input.prompt, ensure_ascii=False)
            of_column = f"set input.user = {column} instead of input.prompt"
            of_template = 'set input.system ("" for none)'
            note(
                f"warning: {self.num_plain:,} {what} text that goes to the model as it is, although it has a chat "
                f"template; {of_template if job.input.prompt is None else of_column} if these are questions to it"
            )
        if self.num_double_bos:
            what = "prompt begins" if self.num_double_bos == 1 else "prompts begin"
            note(
                f"warning: {self.num_double_bos:,} {what} with the BOS token, which the tokenizer adds to every text, "
                "so that it is there twice; take it out of the texts, or give chats as input.messages"
            )
        if self.num_unwritten_tools:
            warn_of_tools(job)
        if self.num_unwritten_calls:
            warn_of_calls(job, self.num_unwritten_calls)
        if self.num_dateless:
            warn_of_date(job)
        if self.lost_null:
            note(
                f"warning: column {job.input.tools!r} has null as {self.lost_null}; in structs, null values and "
                "missing fields look the same, so prompts leave both out; give tools as JSON text to keep nulls"
            )
        if self.lost_const:
            note(
                f"warning: column {job.input.sampling!r} has null as {self.lost_const}; in structs, null values and "
                "missing fields look the same, so schemas leave both out; give sampling as JSON text to keep nulls"
            )
        for sentence, num_rows in self.structured.items():
            note(f"warning: structured_outputs of {count_text(num_rows, 'row')}: {sentence}")
        if self.num_capped:
            leave = "leaves" if self.num_capped == 1 else "leave"
            note(
                f"warning: {count_text(self.num_capped, 'row')} {leave} less room than max_tokens in the window of "
                f"{window:,} tokens"
            )
