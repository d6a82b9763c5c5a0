"""Tables of pandas, polars and Arrow: columns of any type come through, or are refused by their names."""

import datetime
import decimal

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinfer
from batchinfer.api import prompts
from batchinfer.data.inputs import read_batches
from batchinfer.data.kept_fields import cast_kept_columns, kept_fields
from batchinfer.data.shards import find_shards
from support.jobs import question
from support.paths import RANDOM_MODEL

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")

QUESTIONS = [question(number) for number in range(3)]
CHATS = [[{"role": "user", "content": text}] for text in QUESTIONS]
NESTED = [[{"a": ["x"], "b": 1}], [], None]
TEXTS = ["a", None, "longer than the twelve bytes of a view"]
DAY, NOON = datetime.date(2026, 1, 31), datetime.datetime(2026, 1, 31, 12)
LIST, STRUCT, ENUM = pl.List, pl.Struct, pl.Enum(["a", "b"])

# name → (values, dtype); None: what polars makes of them
OF_POLARS = {
    "text": (TEXTS, None),
    "lists": ([["a"], [], None], None),
    "structs": ([{"a": "x"}, {"a": None}, None], None),
    "nested": (NESTED, None),
    "chats": (CHATS, None),
    "category": (["a", None, "b"], pl.Categorical),
    "enum": (["a", None, "b"], ENUM),
    "list of categories": ([["a"], None, ["b", "a"]], LIST(pl.Categorical)),
    "struct of an enum": ([{"a": "a"}, {"a": "b"}, {"a": None}], STRUCT({"a": ENUM})),
    "array": ([[1, 2], None, [3, 4]], pl.Array(pl.Int64, 2)),
    "array of text": ([["a"], None, ["b"]], pl.Array(pl.String, 1)),
    "array of nothing": ([[], None, []], pl.Array(pl.Int8, 0)),
    "lists of arrays": ([[["a"]], None, []], LIST(pl.Array(pl.String, 1))),
    "decimal": ([decimal.Decimal("1.10"), None, decimal.Decimal("-2.00")], None),
    "time": ([datetime.time(12, 30), None, datetime.time(0)], None),
    "date": ([DAY, None, DAY], None),
    "duration": ([datetime.timedelta(days=1), None, datetime.timedelta(0)], None),
    "zone": ([NOON.replace(tzinfo=datetime.UTC), None, None], pl.Datetime("us", "UTC")),
    "bytes": ([b"\xff", None, b""], None),
    "lists of bytes": ([[b"\xff"], None, []], None),
    "null": ([None, None, None], None),
    "boolean": ([True, None, False], None),
    "uint64": ([1, None, 2**64 - 1], pl.UInt64),
    "float32": ([0.5, None, 1.0], pl.Float32),
}
# name → (what makes the column, its values in the answers)
OF_PANDAS = {
    "text": (lambda: pd.Series(TEXTS), TEXTS),
    "category": (lambda: pd.Series(TEXTS, dtype="category"), TEXTS),
    "category of numbers": (lambda: pd.Series([1, 2, None], dtype="category"), [1, 2, None]),
    "cut": (lambda: pd.cut(pd.Series([1, 1, 3]), [0, 2, 4]), [{"left": 0, "right": 2}] * 2 + [{"left": 2, "right": 4}]),
    "nullable": (lambda: pd.Series([1, None, 2], dtype="Int64"), [1, None, 2]),
    "nullable boolean": (lambda: pd.Series([True, None, False], dtype="boolean"), [True, None, False]),
    "arrow text": (lambda: pd.Series(TEXTS, dtype="string[pyarrow]"), TEXTS),
    "arrow lists": (
        lambda: pd.Series([["a"], None, []], dtype=pd.ArrowDtype(pa.large_list(pa.string()))),
        [["a"], None, []],
    ),
    "arrow category": (
        lambda: pd.Series(["a", None, "b"], dtype=pd.ArrowDtype(pa.dictionary(pa.int8(), pa.string()))),
        ["a", None, "b"],
    ),
    "numbers with holes": (lambda: pd.Series([1, None, 2]), [1.0, None, 2.0]),
    "interval": (
        lambda: pd.Series(pd.interval_range(0, 3)),
        [{"left": number, "right": number + 1} for number in range(3)],
    ),
    "period": (lambda: pd.Series(pd.period_range("1970-01", periods=3, freq="M")), [0, 1, 2]),
    "arrays": (lambda: pd.Series([np.array([1, 2]), None, np.array([3])]), [[1, 2], None, [3]]),
    "chats": (lambda: pd.Series(CHATS), CHATS),
    "objects": (lambda: pd.Series([{"a": 1}, {"b": "x"}, None]), [{"a": 1, "b": None}, {"a": None, "b": "x"}, None]),
    "null": (lambda: pd.Series([None] * 3, dtype=object), [None] * 3),
}
LISTS = [["a", None], None, []]


def of_arrow():
    """Columns of three rows of every layout, by name."""
    text = pa.array(["a", None, "b"], pa.string_view())
    indices = pa.array([0, 2, 1], pa.int8())
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), text.slice(1))
    sizes = pa.array([2, 0, 0], pa.int32())
    return {
        "view": text,
        "bytes": pa.array([b"\xff", None, b""], pa.binary_view()),
        "list view": pa.array(LISTS, pa.list_view(pa.string())),
        "large list view": pa.array(LISTS, pa.large_list_view(pa.string_view())),
        "lists out of order": pa.ListViewArray.from_arrays(pa.array([1, 0, 3], pa.int32()), sizes, pa.array([1, 2, 3])),
        "lists of list views": pa.array([LISTS, None, []], pa.list_(pa.list_view(pa.string_view()))),
        "dictionary of views": pa.DictionaryArray.from_arrays(indices, text),
        "dictionary of structs": pa.DictionaryArray.from_arrays(indices, pa.array([{"a": 1}, None, {"a": 2}])),
        "dictionary of lists": pa.DictionaryArray.from_arrays(indices, pa.array(LISTS)),
        "runs": runs,
        "lists of runs": pa.ListArray.from_arrays(pa.array([0, 1, 3, 3]), runs),
        "map": pa.array([[("a", "x")], None, []], pa.map_(pa.string_view(), pa.string_view())),
        "uuid": pa.array([b"0" * 16, None, b"1" * 16], pa.uuid()),
        "lists of uuids": pa.ListArray.from_arrays(pa.array([0, 1, 2, 3]), pa.array([b"0" * 16] * 3, pa.uuid())),
        "json": pa.array(['{"a": 1}', None, "[]"]).cast(pa.json_()),
        "opaque": pa.ExtensionArray.from_storage(pa.opaque(pa.int64(), "type", "vendor"), pa.array([1, None, 3])),
        "float16": pa.array([0.5, None, 1.0], pa.float16()),
        "decimal256": pa.array([1, None, 2], pa.decimal256(60, 2)),
        "large text": pa.array(TEXTS, pa.large_string()),
        "fixed": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    }


# name → a column that Parquet has not
NOT_PARQUET = {
    "dense union": lambda: pa.UnionArray.from_dense(
        pa.array([0, 1, 0], pa.int8()), pa.array([0, 0, 1], pa.int32()), [pa.array(["a", "b"]), pa.array([1])]
    ),
    "sparse union": lambda: pa.UnionArray.from_sparse(pa.array([0, 0, 0], pa.int8()), [pa.array(["a", "b", "c"])]),
    "interval": lambda: pa.array([(1, 2, 3), None, (0, 0, 1)], pa.month_day_nano_interval()),
    "lists of intervals": lambda: pa.array([[(1, 2, 3)], None, []], pa.list_(pa.month_day_nano_interval())),
    "struct of nothing": lambda: pa.array([{}, None, {}], pa.struct([])),
}
# name → a column that is no Arrow data
NOT_ARROW = {
    "mixed": lambda: pd.DataFrame({"x": [1, "a", None]}),
    "mixed lists": lambda: pd.DataFrame({"x": [[1], "a", None]}),
    "complex": lambda: pd.DataFrame({"x": [1j, 2, 3]}),
    "sparse": lambda: pd.DataFrame({"x": pd.arrays.SparseArray([0, 1, 0])}),
    "int128": lambda: pl.DataFrame({"x": pl.Series([1, 2**100, None], dtype=pl.Int128)}),
    "uint128": lambda: pl.DataFrame({"x": pl.Series([1, 2**127, None], dtype=pl.UInt128)}),
    "structs of int128": lambda: pl.DataFrame({"x": pl.Series([{"a": 1}] * 3, dtype=pl.Struct({"a": pl.Int128}))}),
    "two columns of one name": lambda: pd.DataFrame([[1, 2]] * 3, columns=["x", "x"]),
    "lists of int128": lambda: pl.DataFrame({"x": pl.Series([[1], None, []], dtype=pl.List(pl.Int128))}),
    "objects": lambda: pl.DataFrame({"x": pl.Series([object(), "a", None], dtype=pl.Object)}),
}


def through_a_shard(data, folder, **named):
    """The table that a job over `data` reads, which must hold the rows in full."""
    reader, _ = prompts.reader_of(data, named or {"prompt": "prompt"}, {"id"}, None)
    prompts.write_shard(reader, folder / "in" / "prompts.parquet", folder / "run.json", None)
    return pq.read_table(folder / "in" / "prompts.parquet")


def polars_frame(name):
    values, dtype = OF_POLARS[name]
    return pl.DataFrame({"prompt": QUESTIONS, "x": pl.Series(values, dtype=dtype)})


@pytest.mark.parametrize("name", OF_POLARS)
@pytest.mark.parametrize("change", ["whole", "head", "filter", "sort", "concat", "one row", "no rows"])
def test_a_polars_frame_comes_whole(name, change, tmp_path):
    frame = polars_frame(name)
    data = {
        "whole": lambda: frame,
        "head": lambda: frame.head(2),
        "filter": lambda: frame.filter(pl.col("prompt") != QUESTIONS[0]),
        "sort": lambda: frame.sort("prompt", descending=True),
        "concat": lambda: pl.concat([frame, frame.tail(2)], rechunk=False),
        "one row": lambda: frame.slice(1, 1),
        "no rows": frame.clear,
    }[change]()
    found = through_a_shard(data, tmp_path)
    assert found["prompt"].to_pylist() == data["prompt"].to_list()
    assert found["x"].to_pylist() == data["x"].to_list()


@pytest.mark.parametrize("suffix", ["arrow", "stream.arrow", "parquet"])
def test_files_that_polars_writes_come_whole(suffix, tmp_path):
    for number, name in enumerate(OF_POLARS):
        frame, path = polars_frame(name), tmp_path / f"{number}.{suffix}"
        writes = {"arrow": frame.write_ipc, "stream.arrow": frame.write_ipc_stream, "parquet": frame.write_parquet}
        writes[suffix](path)
        shards = find_shards([str(path)])
        kept = kept_fields(shards, ["x"])
        parts = [cast_kept_columns(batch, kept, shards[0])["x"] for batch in read_batches(shards[0], ["x"])]
        assert [value for part in parts for value in part.to_pylist()] == frame["x"].to_list(), name


@pytest.mark.parametrize("name", OF_PANDAS)
def test_a_pandas_frame_comes_whole(name, tmp_path):
    make, values = OF_PANDAS[name]
    frame = pd.DataFrame({"prompt": QUESTIONS, "x": make()})
    found = through_a_shard(frame, tmp_path)["x"]
    assert (
        found.cast(found.type.storage_type) if name in ("cut", "interval", "period") else found
    ).to_pylist() == values
    order = [2, 0]
    again = through_a_shard(frame.iloc[order].set_index(pd.Index(["u", "v"])), tmp_path / "again")
    assert again["prompt"].to_pylist() == [QUESTIONS[row] for row in order]


@pytest.mark.parametrize("name", of_arrow())
@pytest.mark.parametrize("form", ["table", "batch", "reader", "slice"])
def test_arrow_data_comes_whole(name, form, tmp_path):
    column = of_arrow()[name]
    table = pa.table({"prompt": QUESTIONS, "x": column})
    data = {
        "table": lambda: table,
        "batch": lambda: table.to_batches()[0],
        "reader": table.to_reader,
        "slice": lambda: table.slice(1),
    }[form]()
    assert through_a_shard(data, tmp_path)["x"].to_pylist() == column.to_pylist()[form == "slice" :]


@pytest.mark.parametrize("name", NOT_PARQUET)
def test_a_type_that_parquet_has_not_is_left_out_or_refused_by_name(name, tmp_path):
    table = pa.table({"prompt": QUESTIONS, "x": NOT_PARQUET[name]()})
    assert through_a_shard(table, tmp_path).column_names == ["prompt"]
    for kept, named in ((["x"], {}), ([], {"prompt": "x"}), ([], {"template": "{{ x }}"})):
        with pytest.raises(
            batchinfer.InputError, match=r"column 'x' of data cannot be taken: it is .*, which Parquet has"
        ):
            prompts.reader_of(table, named, {"id"}, kept)


def test_a_column_of_system_messages_is_no_column_of_prompts():
    table = pa.table({"ask": QUESTIONS, "role": QUESTIONS, "list": pa.array([[1]] * len(QUESTIONS))})
    with pytest.raises(batchinfer.ConfigError, match="ask"):
        prompts.reader_of(table, {}, {"id", "list"})
    reader, found = prompts.reader_of(table, {}, {"id", "list"}, system="You are {{ role }}.")
    assert (found, reader.schema.names) == ({"prompt": "ask"}, table.column_names)


@pytest.mark.parametrize("name", NOT_ARROW)
def test_a_column_that_is_no_arrow_data_is_left_out_or_refused_by_name(name, tmp_path):
    frame = NOT_ARROW[name]()
    is_pandas = isinstance(frame, pd.DataFrame)
    data = frame.assign(prompt=QUESTIONS) if is_pandas else frame.with_columns(pl.Series("prompt", QUESTIONS))
    found = through_a_shard(data, tmp_path)
    assert (found.column_names, found["prompt"].to_pylist()) == (["prompt"], QUESTIONS)
    for kept, named in ((["x"], {"prompt": "prompt"}), ([], {"prompt": "x"}), ([], {})):
        with pytest.raises(batchinfer.InputError, match="column 'x' of data cannot be taken: ") as raised:
            prompts.reader_of(data, named, {"id"}, kept)
        assert "\n" not in str(raised.value)
    with pytest.raises(batchinfer.InputError, match="column 'x' of data cannot be taken: "):
        prompts.reader_of(frame, {"prompt": "x"}, {"id"}, [])


def test_a_sentence_says_what_to_do_with_columns_of_one_name_and_frames_that_are_not_computed():
    twice = pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"])
    with pytest.raises(batchinfer.InputError, match=r"'prompt' of data .* several columns of this name; rename all"):
        prompts.reader_of(twice, {"prompt": "prompt"}, set())
    with pytest.raises(batchinfer.InputError, match=r"data is a LazyFrame, .*; give data\.collect\(\)"):
        prompts.reader_of(pl.DataFrame({"prompt": QUESTIONS}).lazy(), {}, set())


def test_a_query_of_duckdb_comes_whole_and_runs_once(tmp_path):
    with duckdb.connect() as connection:
        connection.execute("CREATE SEQUENCE ids")
        query = "SELECT nextval('ids') AS id, 'q' || i AS prompt FROM range(5000) rows(i)"
        found = through_a_shard(connection.sql(query), tmp_path)
        assert found.to_pydict() == {"id": list(range(1, 5001)), "prompt": [f"q{i}" for i in range(5000)]}
        assert prompts.reader_of(connection.sql("SELECT 'a' AS prompt WHERE false"), {}, set())[0].read_all() == (
            pa.table({"prompt": pa.array([], pa.string())})
        )


def test_an_index_of_pandas_is_no_column_of_prompts():
    frame = pd.DataFrame({"prompt": QUESTIONS}, index=["u", "v", "w"])
    assert prompts.reader_of(frame, {}, {"id"})[1] == {"prompt": "prompt"}
    named = frame.rename_axis("id").reset_index().set_index("id")
    reader, _ = prompts.reader_of(named, {}, {"id"})
    assert reader.read_all()["id"].to_pylist() == ["u", "v", "w"]


@pytest.mark.parametrize(
    "of", [pd.Series, pl.Series, pa.array, lambda values: pa.chunked_array([values[:1], values[1:]])]
)
@pytest.mark.parametrize(("values", "kind"), [(QUESTIONS, "prompt"), (CHATS, "messages"), ([[1, 2], [3]], "token_ids")])
def test_a_series_is_a_list_of_its_values(of, values, kind):
    reader, columns = prompts.reader_of(of(values), {}, set())
    table = reader.read_all()
    assert columns == {kind: kind}
    assert (table["id"].to_pylist(), table[kind].to_pylist()) == (list(range(len(values))), values)


def test_a_series_of_something_else_is_refused():
    for data in (pd.Series([0.5]), pl.Series([DAY]), pa.array([True])):
        with pytest.raises(batchinfer.InputError, match=r"data is a column of .*, which holds no prompts; give a list"):
            prompts.reader_of(data, {}, set())
    assert prompts.reader_of(pd.Series([None, None]), {}, set())[0].read_all()["prompt"].to_pylist() == [None, None]


@pytest.fixture(scope="module")
def model():
    with batchinfer.Model(RANDOM_MODEL, dtype="float32") as model:
        yield model


def test_frames_have_the_answers_of_lists(model):
    chats = model.generate(CHATS, max_tokens=2)["text"].to_pylist()
    columns = {f"a {name}": pl.Series(values, dtype=dtype) for name, (values, dtype) in OF_POLARS.items()}
    frame = pl.DataFrame({"id": range(3), "messages": CHATS, **columns})
    kept = model.generate(frame, messages="messages", max_tokens=2, output={"keep_columns": list(columns)})
    assert kept["text"].to_pylist() == chats
    for name, column in columns.items():
        assert kept[name].to_pylist() == column.to_list(), name
    part = frame.select("id", "messages").filter(pl.col("id") > 0)
    assert model.generate(part, max_tokens=2)["text"].to_pylist() == chats[1:]
    assert model.generate(part["messages"], max_tokens=2)["text"].to_pylist() == chats[1:]


def test_kept_columns_of_any_layout_come_back(model):
    columns = of_arrow()
    output = {"keep_columns": list(columns)}
    found = model.generate(pa.table({"q": QUESTIONS, **columns}), prompt="q", max_tokens=1, output=output)
    for name, column in columns.items():
        assert found[name].to_pylist() == column.to_pylist(), name
    assert found["dictionary of views"].type == found["runs"].type == pa.string()
    lines = {"keep_columns": ["list view", "runs", "lists of uuids"], "format": "jsonl"}
    found = model.generate(pa.table({"q": QUESTIONS, **columns}), prompt="q", max_tokens=1, output=lines)
    assert found["list view"].to_pylist() == LISTS


@pytest.mark.parametrize("more", ["", ".\nTry again later\nor ask the operator."])
@pytest.mark.parametrize("num_batches", [0, 1])
@pytest.mark.parametrize("fault", [RuntimeError, ValueError, KeyError, OSError])
def test_an_error_of_a_callers_own_reader_is_told_by_its_first_line(tmp_path, fault, num_batches, more):
    schema = pa.schema([("prompt", pa.string())])

    def batches():
        yield from [pa.record_batch([["a"]], schema=schema)] * num_batches
        raise fault(f"connection lost{more}")

    def write():
        reader, _ = prompts.reader_of(pa.RecordBatchReader.from_batches(schema, batches()), {}, set())
        prompts.write_shard(reader, tmp_path / "input" / "prompts.parquet", tmp_path / "run.json", None)

    match = (
        r"^data cannot be read: .{0,20}connection lost('|'?\.\\nTry.*)?$"  # a KeyError shows its text as Python does
    )
    with pytest.raises(batchinfer.InputError, match=match):
        write()
