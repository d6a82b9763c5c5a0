"""Choices of rows (input.choices) as token ids that follow the row's prompt; a bad choice makes its row bad.

All choices of a batch are encoded as one column:

    rows      [" Paris", " Rome"]   [" yes", " no", " perhaps"]
    places       0         1           2       3       4
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.data.columns import ENCODED, is_text, list_lengths, token_lists
from batchinfer.data.encoders import Encoders, Pieces
from batchinfer.data.prompts import PromptLimits, RowBatch, bad_ids
from batchinfer.data.tokenizer_process import CHOICE
from batchinfer.sanitize import count_text


@dataclass(slots=True)
class Choices:
    """The choices of a batch of R rows while they are encoded and checked."""

    counts: np.ndarray  # [R] choices of each row
    flat: pa.Array  # all of them, as texts or as lists of token ids
    pieces: Pieces = field(default_factory=list)  # their encoding, for texts

    @property
    def rows(self) -> np.ndarray:
        """[places] int64, the row of each choice."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


class ChoiceChecks:
    """Encodes the column of choices and checks that the model can take the token ids."""

    def __init__(self, column: str, encoders: Encoders, limits: PromptLimits) -> None:
        self._column = column
        self._encoders = encoders
        self._limits = limits

    def start(self, batch: RowBatch) -> Choices:
        """Begin to encode the choices of a batch; `checked` waits for the result."""
        column = batch.columns[self._column]
        if pa.types.is_null(column.type):
            column = column.cast(pa.list_(pa.string()))
        choices = Choices(list_lengths(column), pc.list_flatten(column))
        if pa.types.is_string_view(choices.flat.type):
            choices.flat = choices.flat.cast(pa.large_string())
        if is_text(choices.flat.type):
            texts, most_chars = choices.flat, self._encoders.most_chars
            if most_chars is not None:  # longer ones need not travel to a worker
                num_chars = pc.utf8_length(texts)
                is_long = pc.greater(num_chars, most_chars).fill_null(False)
                sentence = f"characters, more than fit into {self._limits.window} tokens"
                for place in _places(is_long):
                    self._blame(batch, choices, place, f"has {num_chars[place].as_py()} {sentence}")
                texts = pc.if_else(is_long, pa.scalar("", texts.type), texts)
            choices.pieces = self._encoders.start(texts.fill_null(""), CHOICE)
        return choices

    def checked(self, batch: RowBatch, choices: Choices, prompt_tokens: np.ndarray) -> pa.Array:
        """Return [R] lists of choices, each a list of token ids; blame rows with a bad choice.

        Args:
            prompt_tokens: [R] number of tokens of each row's prompt.
        """
        is_null = batch.columns[self._column].is_null()
        for row in np.flatnonzero(choices.counts == 0).tolist():
            batch.blame(row, f"{self._column} is {'null' if is_null[row].as_py() else 'an empty list'}")
        for place in _places(choices.flat.is_null()):
            self._blame(batch, choices, place, "is null")
        ids = self._encoded(batch, choices) if is_text(choices.flat.type) else token_lists(choices.flat)
        for place, sentence in bad_ids(ids, self._limits.vocab_size):
            self._blame(batch, choices, place, f"cannot be taken: {sentence}")
        lengths, before, window = list_lengths(ids), prompt_tokens[choices.rows], self._limits.window
        for place in np.flatnonzero(lengths == 0).tolist():
            self._blame(batch, choices, place, "has no tokens")
        for place in np.flatnonzero(before + lengths > window).tolist():
            tokens = count_text(int(lengths[place]), "token")
            sentence = f"has {tokens}, which with the prompt's {before[place]} are more than the window"
            self._blame(batch, choices, place, f"{sentence} of {window}")
        return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(choices.counts)]), pa.int32()), ids)

    def _encoded(self, batch: RowBatch, choices: Choices) -> pa.Array:
        """Return [places] lists of token ids; [] for a text that cannot be encoded, whose row is blamed."""
        encoded = pa.Table.from_batches((piece.result() for piece in choices.pieces), schema=ENCODED)
        for place in _places(encoded["error"].is_valid()):
            self._blame(batch, choices, place, f"cannot be taken: {encoded['error'][place].as_py()}")
        with_control = choices.rows[_places(encoded["control_tokens"])]
        if batch.holds_control is None:
            batch.holds_control = np.zeros(batch.num_rows, dtype=bool)
        batch.holds_control = batch.holds_control | np.isin(np.arange(batch.num_rows), with_control)
        return pa.concat_arrays([pa.array([], ENCODED.field("token_ids").type), *encoded["token_ids"].chunks])

    def _blame(self, batch: RowBatch, choices: Choices, place: int, sentence: str) -> None:
        rows = choices.rows
        index = place - int(np.searchsorted(rows, rows[place]))
        batch.blame(int(rows[place]), f"{self._column}[{index}] {sentence}")


def _places(flags: pa.Array | pa.ChunkedArray) -> list[int]:
    """Return the positions of the flags that are set."""
    found: list[int] = np.flatnonzero(np.asarray(flags)).tolist()
    return found
