"""Prompts of a batch of rows as token ids; a bad prompt gives its row an error sentence."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.config import JobConfig
from batchinfer.data.columns import ENCODED, list_lengths, token_lists, without_dictionary
from batchinfer.data.encoders import Encoders, Pieces
from batchinfer.data.formats.line_rows import AS_JSON
from batchinfer.data.text_encoder import too_long
from batchinfer.sanitize import clip


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """The model's limits for prompts."""

    window: int  # most tokens of prompt and output together
    vocab_size: int  # token ids are below it


@dataclass(slots=True)
class RowBatch:
    """A batch of R rows while it is checked; `errors` has the first problem of each bad row."""

    columns: pa.RecordBatch
    num_rows: int
    errors: dict[int, str] = field(default_factory=dict)
    holds_control: np.ndarray | None = None  # [R] bool, whether the text has control tokens; None: in no row

    def blame(self, row: int, sentence: str) -> None:
        self.errors.setdefault(row, clip(sentence))

    def blame_all(self, sentence: str) -> None:
        for row in range(self.num_rows):
            self.blame(row, sentence)


class PromptChecks:
    """Encodes the job's prompt column and checks that the model can take the token ids."""

    def __init__(self, job: JobConfig, encoders: Encoders, limits: PromptLimits) -> None:
        self._prompt, self._kind = job.input.prompt_column, job.input.prompt_kind
        self._encoders = encoders
        is_raw = self._kind in ("prompt", "template") and not job.input.makes_chats
        self._bos = encoders.bos_token_id if is_raw else None
        self._limits = limits

    def start(self, batch: RowBatch, known: pa.RecordBatch | None = None) -> Pieces:
        """Begin to encode the prompts of a batch; `checked` waits for the result.

        Args:
            known: the encoded prompts (columns.ENCODED), if they are known from an earlier run.
        """
        if self._kind == "token_ids":
            return []
        if known is not None:
            done: Future[pa.RecordBatch] = Future()
            done.set_result(known)
            return [done]
        columns = [_values(batch.columns, name) for name in self._encoders.columns]
        if self._kind == "template" or len(columns) > 1:
            return self._encoders.start(pa.StructArray.from_arrays(columns, names=self._encoders.columns))
        (column,) = columns
        most_chars = self._encoders.most_chars
        if self._kind in ("user", "prompt") and most_chars is not None and not pa.types.is_null(column.type):
            # a character has at most four bytes: longer texts need not be sent to a worker
            is_long = pc.greater(pc.binary_length(column), 4 * most_chars).fill_null(False)
            for row in np.flatnonzero(is_long.to_numpy(zero_copy_only=False)).tolist():
                num_chars = pc.utf8_length(column.slice(row, 1))[0].as_py()
                batch.blame(row, too_long(num_chars, self._encoders.window))
            column = pc.if_else(is_long, pa.scalar("", column.type), column) if batch.errors else column
        return self._encoders.start(column)

    def checked(self, batch: RowBatch, pieces: Pieces) -> pa.Array:
        """Return [R] lists of token ids; blame rows with a bad prompt."""
        if self._kind == "token_ids":
            column = batch.columns[self._prompt]
            prompts = token_lists(column)
            for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
                batch.blame(row, f"{self._prompt} is null")
        else:
            encoded = pa.Table.from_batches((piece.result() for piece in pieces), schema=ENCODED).combine_chunks()
            errors = encoded["error"]
            for row in np.flatnonzero(errors.is_valid().to_numpy()).tolist():
                batch.blame(row, errors[row].as_py())
            batch.holds_control = encoded["control_tokens"].to_numpy()
            prompts = pa.concat_arrays(encoded["token_ids"].chunks)
        for row, sentence in bad_ids(prompts, self._limits.vocab_size):
            batch.blame(row, sentence)
        for row in np.flatnonzero(list_lengths(prompts) == 0).tolist():
            batch.blame(row, "the prompt has no tokens")
        return prompts

    def have_double_bos(self, prompts: pa.Array) -> np.ndarray:
        """Return [R] whether prompts of raw text begin with the BOS token twice, as their texts have one, too."""
        is_double = np.zeros(len(prompts), dtype=bool)
        if self._bos is not None:
            ids, has_two = prompts.values.to_numpy(zero_copy_only=False), list_lengths(prompts) > 1
            starts = prompts.offsets.to_numpy()[:-1][has_two]
            is_double[has_two] = (ids[starts] == self._bos) & (ids[starts + 1] == self._bos)
        return is_double

    def check_room(self, batch: RowBatch, lengths: np.ndarray, max_tokens: np.ndarray) -> None:
        """Mark rows as bad whose prompt does not fit into the window, with room for a new token if one is wanted.

        Args:
            lengths: [R] tokens of the prompts.
            max_tokens: [R] new tokens asked for.
        """
        window = self._limits.window
        for row in np.flatnonzero(lengths + (max_tokens > 0) > window).tolist():
            more = "no room for a new one in" if max_tokens[row] > 0 else "more than"
            batch.blame(row, f"the prompt has {lengths[row]} tokens, {more} the window of {window}")


def bad_ids(lists: pa.Array, vocab_size: int) -> Iterator[tuple[int, str]]:
    """Yield (position, error sentence) of each list with a token id that is null, negative or not in the model."""
    ids = lists.flatten()
    kind = pa.uint64() if ids.type == pa.uint64() else pa.int64()
    too_large = pc.greater_equal(ids, pa.scalar(vocab_size, kind))
    is_bad = pc.or_kleene(pc.less(ids, pa.scalar(0, kind)), too_large).fill_null(True)
    positions = np.flatnonzero(is_bad.to_numpy(zero_copy_only=False))
    if len(positions) == 0:
        return
    places, first = np.unique(np.repeat(np.arange(len(lists)), list_lengths(lists))[positions], return_index=True)
    for place, position in zip(places.tolist(), positions[first].tolist(), strict=True):
        value = ids[position].as_py()
        shown = "null" if value is None else f"{value}, which is not in [0, {vocab_size})"
        yield place, f"a token id is {shown}"


def _values(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column, as Arrow's JSON if the batch has its values as JSON text."""
    if AS_JSON + name in batch.schema.names:
        return pa.ExtensionArray.from_storage(pa.json_(), batch[AS_JSON + name])
    return _plain(batch[name])


def _plain(column: pa.Array) -> pa.Array:
    column = without_dictionary(column)
    return column.cast(pa.large_string()) if pa.types.is_string_view(column.type) else column
