"""Token texts in columns of log-probabilities."""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.data.schemas.table import LOGPROBS, LOGPROBS_WITH_TEXTS


class TokenTexts:
    """A converter that adds texts to columns of log-probabilities; each token id is decoded once.

    Args:
        decode: returns the text of a token id.
    """

    def __init__(self, decode: Callable[[int], str]) -> None:
        self._decode = decode
        self._ids, self._texts = pa.array([], pa.int32()), pa.array([], pa.string())

    def add(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with each column of type LOGPROBS converted to LOGPROBS_WITH_TEXTS."""
        for place, field in enumerate(batch.schema):
            if field.type == LOGPROBS:
                with_texts = self._with_texts(batch.column(place)).cast(LOGPROBS_WITH_TEXTS)
                batch = batch.set_column(place, field.with_type(LOGPROBS_WITH_TEXTS), with_texts)
        return batch

    def _with_texts(self, lists: pa.ListArray) -> pa.ListArray:
        """Add a field `token` after token_id to lists of {token_id, logprob, …}, and to the lists `top` inside them."""
        entries = lists.flatten()  # without those of null lists
        ends = pc.cumulative_sum(pc.fill_null(lists.value_lengths(), 0))
        offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends.cast(pa.int32())])
        columns = dict(zip(entries.type.names, entries.flatten(), strict=True))
        token_ids = columns.pop("token_id")
        found = {"token_id": token_ids, "token": self._texts_of(token_ids), **columns}
        if "top" in found:
            found["top"] = self._with_texts(found["top"])
        structs = pa.StructArray.from_arrays([*found.values()], [*found], mask=entries.is_null())
        return pa.ListArray.from_arrays(offsets, structs, mask=lists.is_null())

    def _texts_of(self, token_ids: pa.Array) -> pa.Array:
        asked = pc.unique(token_ids.drop_null())
        new = asked.filter(pc.invert(pc.is_in(asked, self._ids)))
        self._ids = pa.concat_arrays([self._ids, new])
        self._texts = pa.concat_arrays([self._texts, pa.array(map(self._decode, new.to_pylist()), pa.string())])
        return self._texts.take(pc.index_in(token_ids, self._ids))
