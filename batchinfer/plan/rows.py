"""Columns of a job's tokenised rows in memory, one prompt per choice, without the token ids, which are passed on."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.data.columns import list_lengths
from batchinfer.data.parquet import own_parquet
from batchinfer.manifest import Manifest
from batchinfer.plan.answer_digests import sampling_digest
from batchinfer.plan.prefetch import prefetched
from batchinfer.plan.prefix.prompt_parts import index_type, offsets_of
from batchinfer.records import Sampling, Shard, sampling_from_json
from batchinfer.rundir import RunDir

COLUMNS = ["row", "n", "token_ids", "max_tokens", "sampling", "error", "control_tokens", "choices"]
_NAMES = ("shard", "row", "n", "max_tokens", "code", "length", "choice", "score_from")
BATCH_ROWS = 4096
NO_CODE = -1  # code of null: a row with the job's own sampling


class SamplingTexts:
    """Distinct sampling overrides in compact form: a schema that many overrides share is in memory once."""

    def __init__(self) -> None:
        self._code_of: dict[tuple[str, ...], int] = {}
        self._parts: list[tuple[str, ...]] = []  # by code
        self._shared: dict[str, str] = {}

    def code_of(self, text: str) -> int:
        """Return the index of the text; a new text gets the next index."""
        # inside a value quotes are escaped, so this is the key; its value ends at the next key
        head, key, rest = text.partition('"structured": ')
        shared, next_key, tail = rest.partition(', "temperature": ')
        parts = (head + key, self._shared.setdefault(shared, shared), next_key + tail)
        code = self._code_of.setdefault(parts, len(self._parts))
        if code == len(self._parts):
            self._parts.append(parts)
        return code

    def __getitem__(self, code: int) -> str:
        return "".join(self._parts[code])

    def __iter__(self) -> Iterator[str]:
        return map("".join, self._parts)


@dataclass(frozen=True, slots=True)
class RowTable:
    """The good rows of all shards in input order (R rows), one per choice of a row with choices.

    The integers are int32 where they fit. A column of equal values, of which a job has many, is a view of one value,
    so that most jobs need 12 bytes per row.
    """

    shard: np.ndarray  # [R] int32
    row: np.ndarray  # [R] int32, or int64 for a shard of more rows than that
    n: np.ndarray  # [R] int32, samples
    max_tokens: np.ndarray  # [R] int32
    sampling_code: np.ndarray  # [R] int32, index into sampling_texts or NO_CODE
    sampling_texts: SamplingTexts  # distinct overrides, as JSON
    is_greedy: np.ndarray  # [C + 1] bool, by sampling_code of the C overrides; NO_CODE finds the job's own
    seed: np.ndarray  # [C + 1] int64, the same of seeds
    sampling_digest: np.ndarray  # [C + 1, 2] uint64, the same of settings that decide an answer (answer_digests.py)
    num_tokens: np.ndarray  # [R] int32
    choice: np.ndarray  # [R] int32, the row's choice that ends this prompt; 0 for a row without choices
    score_from: np.ndarray  # [R] int32, see records.Request
    num_bad: int  # output rows of bad input rows
    num_input_rows: int
    num_control: int  # input rows whose text holds control tokens


@dataclass(frozen=True, slots=True)
class RowIds:
    """Ids of the good rows of all shards, in the order of the RowTable."""

    text: pa.Array  # [R] large_string, null where the input has none
    occurrence: np.ndarray  # [R] int64, rows with the same id before this one


def load_rows(
    run: RunDir,
    manifest: Manifest,
    shards: list[Shard],
    default: Sampling,
    add_prompts: Callable[[np.ndarray, np.ndarray], None],
) -> RowTable:
    """Read tokens/*.parquet of the readable shards in input order, good rows only.

    Args:
        manifest: vouches for these files.
        default: the job's own sampling.
        add_prompts: called with the prompts of the next rows: flat token ids and offsets (see PrefixStream.add).

    Raises:
        ConfigError: a file of the run folder is damaged.
    """
    readable = [shard.num_rows for shard in shards if shard.problem is None]
    of_row = index_type(max(readable, default=0))
    rows = {name: _GrowingColumn(sum(readable), of_row if name == "row" else np.int32) for name in _NAMES}
    texts = SamplingTexts()
    num_bad = num_input_rows = num_control = 0
    for shard, batch in _batches(run, manifest, shards, COLUMNS):
        is_good = pc.is_null(batch["error"])
        num_input_rows += len(batch)
        num_control += batch["control_tokens"].true_count
        num_bad += pc.sum(batch["n"].filter(pc.invert(is_good))).as_py() or 0
        good = batch if is_good.true_count == len(batch) else batch.filter(is_good)  # a filter copies the tokens
        codes = _codes(good["sampling"], texts)
        for prompts in prompts_of(good["token_ids"], good["choices"]):
            add_prompts(prompts.token_ids, prompts.offsets)
            found = {
                "shard": np.full(len(prompts.row), shard.index, dtype=np.int32),
                **{name: good[name].to_numpy()[prompts.row] for name in ("row", "n", "max_tokens")},
                "code": codes[prompts.row],
                "length": np.diff(prompts.offsets),
                "choice": prompts.choice,
                "score_from": prompts.score_from,
            }
            for name, column in rows.items():
                column.add(found[name])
    columns = {name: column.values for name, column in rows.items()}
    is_greedy, seed, scores_prompt, *digest = _by_code(texts, default)
    return RowTable(
        shard=columns["shard"],
        row=columns["row"],
        n=columns["n"],
        max_tokens=columns["max_tokens"],
        sampling_code=columns["code"],
        sampling_texts=texts,
        is_greedy=is_greedy,
        seed=seed,
        sampling_digest=np.stack(digest, axis=1),
        num_tokens=columns["length"],
        choice=columns["choice"],
        # from the choice on, or from the second token on where the prompt's log-probabilities are wanted
        score_from=np.where(columns["score_from"] == 0, scores_prompt[columns["code"]], columns["score_from"])
        if scores_prompt.any()
        else columns["score_from"],
        num_bad=num_bad,
        num_input_rows=num_input_rows,
        num_control=num_control,
    )


class _GrowingColumn:
    """A column that comes batch by batch, as one array of its likely size: many small ones would leave gaps in memory.

    As long as all values are equal, only one is kept.

    Args:
        likely_size: values that are expected.
    """

    def __init__(self, likely_size: int, dtype: type[np.signedinteger] = np.int32) -> None:
        self._likely_size = likely_size
        self._array = np.zeros(1, dtype=dtype)
        self._is_constant = True
        self._size = 0

    def add(self, values: np.ndarray) -> None:
        """Add the next values ([K] integers)."""
        if len(values) == 0:
            return
        if self._size == 0:
            self._array[0] = values[0]
        end = self._size + len(values)
        if self._is_constant and (values != self._array[0]).any():
            self._is_constant, value = False, self._array[0]
            self._array = np.empty(max(self._likely_size, end), dtype=self._array.dtype)
            self._array[: self._size] = value
        if not self._is_constant:
            if end > len(self._array):
                more = np.empty(max(end, 2 * self._size) - len(self._array), dtype=self._array.dtype)
                self._array = np.concatenate([self._array, more])
            self._array[self._size : end] = values
        self._size = end

    @property
    def values(self) -> np.ndarray:
        """[num_values] integers; read-only if all are equal."""
        return np.broadcast_to(self._array, self._size) if self._is_constant else self._array[: self._size]


def _by_code(texts: SamplingTexts, default: Sampling) -> Iterator[np.ndarray]:
    """Return by sampling code, [C + 1] each: is it greedy, the seed, are the prompt's log-probabilities wanted, digest.

    The digest is in two halves. Each text is parsed once.
    """
    asked = (
        (sampling.is_greedy, sampling.seed, sampling.prompt_logprobs is not None, *sampling_digest(sampling))
        for sampling in chain(map(sampling_from_json, texts), (default,))
    )
    found = np.fromiter(asked, dtype="bool,i8,bool,u8,u8")
    return (found[name] for name in found.dtype.names or ())


def take(column: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the values of a column of a RowTable at `index` ([K] integers); of equal values, a view of one."""
    return np.broadcast_to(column[:1], len(index)) if column.strides == (0,) and len(column) else column[index]


def load_ids(run: RunDir, manifest: Manifest, shards: list[Shard]) -> RowIds:
    """Read the ids of the rows that `load_rows` reads; bad rows count as occurrences too.

    Raises:
        ConfigError: a file of the run folder is damaged.
    """
    ids, good_flags = [], []
    for _, batch in _batches(run, manifest, shards, ["id", "error"]):
        ids.append(batch["id"].cast(pa.large_string()))
        good_flags.append(pc.is_null(batch["error"]).to_numpy(zero_copy_only=False))
    if not ids:
        return RowIds(pa.array([], pa.large_string()), np.zeros(0, np.int64))
    is_good = np.concatenate(good_flags)
    text = pa.concat_arrays(ids)
    return RowIds(text.filter(pa.array(is_good)), _occurrences(text)[is_good])


def first_equal(*sorted_keys: np.ndarray) -> np.ndarray:
    """Return [N] int64, for each place the first place with the same keys ([N] each, equal keys are adjacent)."""
    places = np.arange(len(sorted_keys[0]))
    is_first = np.zeros(len(places), dtype=bool)
    is_first[:1] = True
    for keys in sorted_keys:
        is_first[1:] |= keys[1:] != keys[:-1]
    return np.maximum.accumulate(np.where(is_first, places, 0))


def _batches(
    run: RunDir, manifest: Manifest, shards: list[Shard], columns: list[str]
) -> Iterator[tuple[Shard, pa.RecordBatch]]:
    """Yield the tokenised rows in batches, each of one row group; the next batch is read in advance."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield from prefetched(_batches_read(run, manifest, shards, columns), pool)


def _batches_read(
    run: RunDir, manifest: Manifest, shards: list[Shard], columns: list[str]
) -> Iterator[tuple[Shard, pa.RecordBatch]]:
    for shard in shards:
        if shard.problem is not None:
            continue
        path = run.tokens(shard.index)
        with own_parquet(path, manifest) as file:
            for group in range(file.num_row_groups):
                # one row group at a time: else Arrow keeps the data of earlier row groups in memory
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
                    yield shard, batch


def _codes(texts: pa.Array, known_texts: SamplingTexts) -> np.ndarray:
    """Return [N] int32 codes of the texts, NO_CODE for null; new texts get the next codes."""
    encoded = texts.dictionary_encode()
    known = [known_texts.code_of(text) for text in encoded.dictionary.to_pylist()]
    # the code of null comes last, where index -1 finds it
    return np.array([*known, NO_CODE], dtype=np.int32)[encoded.indices.fill_null(-1).to_numpy()]


def _occurrences(ids: pa.Array) -> np.ndarray:
    """Return [N] int64, the number of equal ids before each id; 0 for null ids."""
    codes = ids.dictionary_encode().indices.fill_null(NO_CODE).to_numpy()
    by_code = np.argsort(codes, kind="stable")
    occurrence = np.empty(len(codes), dtype=np.int64)
    occurrence[by_code] = np.arange(len(codes)) - first_equal(codes[by_code])
    occurrence[codes == NO_CODE] = 0
    return occurrence


MOST_TOKENS = 1 << 23  # of the prompts yielded together, at least one


@dataclass(frozen=True, slots=True)
class Prompts:
    """Some prompts in input order."""

    token_ids: np.ndarray  # flat
    offsets: np.ndarray  # [K + 1] int64
    row: np.ndarray  # [K] int64, position of the prompt's row in the batch
    choice: np.ndarray  # [K] int32, 0 for a row without choices
    score_from: np.ndarray  # [K] int64, where the choice begins; 0 for a row without choices


def prompts_of(token_ids: pa.Array, choices: pa.Array) -> Iterator[Prompts]:
    """Yield the prompts of good rows.

    Args:
        token_ids: [B] lists of tokens.
        choices: [B] lists of lists of tokens, null for a row without choices.
    """
    tokens, lengths = token_ids.flatten().to_numpy(), list_lengths(token_ids)
    if choices.null_count == len(choices):
        none = np.zeros(len(lengths), dtype=np.int64)
        yield Prompts(tokens, offsets_of(lengths), np.arange(len(lengths)), none.astype(np.int32), none)
        return
    starts, flat = offsets_of(lengths)[:-1], choices.flatten()
    row = np.repeat(np.arange(len(lengths)), list_lengths(choices))
    choice = np.arange(len(row)) - np.searchsorted(row, row)
    of_choice = list_lengths(flat)
    totals, choice_tokens, choice_starts = lengths[row] + of_choice, flat.flatten().to_numpy(), offsets_of(of_choice)
    ends = np.cumsum(totals)
    first = 0
    while first < len(row):
        base = ends[first - 1] if first else 0
        end = max(int(np.searchsorted(ends, base + MOST_TOKENS, side="right")), first + 1)
        part = slice(first, end)
        offsets = offsets_of(totals[part])
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], totals[part])
        begin = np.repeat(lengths[row[part]], totals[part])  # of the choice
        is_prompt = place < begin
        joined = np.empty(offsets[-1], dtype=tokens.dtype)
        joined[is_prompt] = tokens[(np.repeat(starts[row[part]], totals[part]) + place)[is_prompt]]
        joined[~is_prompt] = choice_tokens[
            (np.repeat(choice_starts[:-1][part], totals[part]) + place - begin)[~is_prompt]
        ]
        yield Prompts(joined, offsets, row[part], choice[part].astype(np.int32), lengths[row[part]])
        first = end
