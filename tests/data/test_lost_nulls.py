"""Nulls in struct columns of tools and of sampling: told where they may be values, and nowhere else."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.row_values import first_lost_null
from batchinfer.data.tokenizer import load_tokenizer
from support.hostile import model_folder
from support.jobs import batchinfer, write_job

TEMPLATE = "{{ tools | tojson if tools }}{{ messages[0].content }}"
B, C, D = {"b": {"default": None}}, {"c": {"enum": ["x", None]}}, {"d": {"const": None}}


def tool(properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def rows(*properties):
    return pa.array([None if one is None else [tool(one)] for one in properties])


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (rows(B | C, D), (0, "default")),
        (rows(C, D), (1, "const")),
        (rows(C), None),  # an item of a list is no field: it stays
        (rows(None, {"b": {"type": "string", "default": 5}}, {"b": {"type": "string"}}), (2, "default")),
        (rows({"b": {"type": "string"}}, {"c": {"type": "string", "default": 5}}), None),  # b is not there in row 1
        (rows({"default": {"type": "string"}}, {"x": {"type": "string"}}), None),  # a parameter of this name
        (rows({"b": {"items": {"type": "string", "const": None}}}), (0, "const")),
        (rows({"b": {"anyOf": [{"const": 1}, {"const": None}]}}), (0, "const")),
        (pa.array([[], [tool({"x": {"type": "string"}}), tool(B)]]), (1, "default")),
        (pa.array([tool({"x": {"type": "string"}}), tool(B)]), (1, "default")),
        (pa.array([[tool(B)], [tool(D)]]).cast(pa.large_list(rows(B, D).type.value_type)), (0, "default")),
        # a struct of nulls alone, as polars fills up with
        (pa.array([[tool({"b": {"type": "x", "default": 5}})], [tool({"b": {"type": None, "default": None}})]]), None),
        (pa.array(['[{"default": null}]', None]), None),
        (pa.nulls(2), None),
        (rows().cast(rows(B).type), None),
    ],
)
def test_the_first_null_that_may_be_a_value_is_found(column, found):
    assert first_lost_null(column) == found
    if found is not None:  # wherever a batch begins
        again = first_lost_null(pa.concat_arrays([column.slice(0, 0), column]).slice(found[0]))
        assert again == (0, found[1])


def prompts_of(folder, name):
    tokenizer = load_tokenizer(folder / "model")
    tokens = pq.read_table(folder / name / "tokens")["token_ids"].to_pylist()
    return [tokenizer.decode(ids) for ids in tokens]


def test_a_plan_names_the_first_row_once_and_json_text_keeps_the_nulls(tmp_path):
    model_folder(tmp_path / "model", template=TEMPLATE)
    tools = [[tool(B | C)], [tool(D)]]
    chats = [[{"role": "user", "content": "hello"}]] * 2
    warned, prompts = {}, {}
    for name, column in (("structs", tools), ("texts", [json.dumps(one) for one in tools])):
        (tmp_path / name).mkdir()
        for part in ("a", "b"):
            pq.write_table(pa.table({"m": chats, "tools": column}), tmp_path / name / f"{part}.parquet")
        job = write_job(
            tmp_path,
            input={"files": [f"{name}/*"], "prompt": None, "messages": "m", "tools": "tools"},
            output={"dir": f"{name}-run"},
            model={"path": str(tmp_path / "model")},
        )
        for _ in range(2):  # the second from what the first found
            ended = batchinfer("plan", job)
            assert ended.code == 0, ended.err
            warned.setdefault(name, [line for line in ended.err.splitlines() if "'tools'" in line])
        prompts[name] = prompts_of(tmp_path, f"{name}-run")
    assert warned == {
        "structs": [
            f"warning: column 'tools' has null as default in row 0 of {tmp_path}/structs/a.parquet; in structs, null "
            "values and missing fields look the same, so prompts leave both out; give tools as JSON text to keep nulls"
        ],
        "texts": [],
    }
    assert '"b": {"default": null}' in prompts["texts"][0]
    assert '"b": {}' in prompts["structs"][0]
    for found in prompts.values():
        assert '"c": {"enum": ["x", null]}' in found[0]


SCHEMAS = [
    {"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 7},
    {"const": 5},
    {"type": "object", "properties": {"a": {"const": 1}, "b": {"enum": ["x", None]}}, "required": ["a"]},
    {"type": "object", "properties": {"c": {"type": "string", "default": None}}},
]


def samplings_of(folder, override_column, name):
    """The sampling of each row, its JSON read, and what a plan warns of."""
    columns = {"prompt": ["Give"] * len(override_column), "s": override_column}
    if name == "lines":
        lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        (folder / "lines.jsonl").write_text("\n".join(lines))
        files = ["lines.jsonl"]
    else:
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
        files = [f"{name}.parquet"]
    job = write_job(folder, input={"files": files, "sampling": "s"}, output={"dir": f"{name}-run"})
    ended = batchinfer("plan", job)
    assert ended.code == 0, ended.err
    rows = pq.read_table(folder / f"{name}-run" / "tokens").to_pylist()
    warned = [line for line in ended.err.splitlines() if "column 's'" in line]
    return [json.loads(row["sampling"]) for row in rows], warned


def test_nulls_that_pad_structs_are_no_part_of_schemas_and_biases(tmp_path):
    overrides = [{"structured_outputs": {"json": schema}} for schema in SCHEMAS]
    overrides += [{"logit_bias": {"5": 1.0}}, {"logit_bias": {"6": 1.0}, "structured_outputs": {"regex": "a"}}]
    found, warned = {}, {}
    for name in ("structs", "texts", "lines"):
        column = [json.dumps(one) for one in overrides] if name == "texts" else overrides
        found[name], warned[name] = samplings_of(tmp_path, column, name)
    asked = [json.loads(one["structured"][1]) for one in found["structs"][:4]]
    assert asked == [*SCHEMAS[:3], {"type": "object", "properties": {"c": {"type": "string"}}}]
    assert found["texts"] == found["lines"]
    assert found["structs"][4:] == found["texts"][4:]
    assert (warned["texts"], warned["lines"]) == ([], [])
    assert warned["structs"] == [
        f"warning: column 's' has null as const in row 0 of {tmp_path}/structs.parquet; in structs, null values and "
        "missing fields look the same, so schemas leave both out; give sampling as JSON text to keep nulls"
    ]


def test_a_null_const_of_json_lines_counts(tmp_path):
    overrides = [{"structured_outputs": {"json": {"const": None}}}, {"structured_outputs": {"json": {"const": 5}}}]
    found, warned = samplings_of(tmp_path, overrides, "lines")
    assert [json.loads(one["structured"][1]) for one in found] == [{"const": None}, {"const": 5}]
    assert warned == []
    _, warned = samplings_of(tmp_path, overrides, "structs")
    assert len(warned) == 1
